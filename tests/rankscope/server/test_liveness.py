from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rankscope.analysis.report.liveness import RankLiveness, SilentRank
from rankscope.collector.store.store import open_store
from rankscope.server.provider import read_heard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankscope.collector.identity import Row
    from rankscope.collector.store.store import Store

S = 1_000_000_000
NOW_NS = 1_900_000_000 * S


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(f"chdb://{tmp_path_factory.mktemp('store')}") as opened:
        yield opened


def beat(run_id: str, rank: int, *, age_s: float, **changes: Any) -> Row:  # noqa: ANN401
    row = {
        "run_id": run_id, "rank": rank, "host": f"node-{rank // 8}", "pid": 7, "step": 40,
        "at_ns": NOW_NS - int(age_s * S), "state": "training", "epoch": 0,
    }  # fmt: skip
    return row | changes


def test_nobody_who_tells_of_ranks_is_no_answer(store: Store) -> None:
    assert read_heard(store, "unheard of", now_ns=NOW_NS) is None


def test_ages_are_told_apart_at_5_and_15_seconds(store: Store) -> None:
    ages_s = (0, 5, 5.1, 15, 15.1, 400)
    store.insert_rows("heartbeats", [beat("ages", r, age_s=age) for r, age in enumerate(ages_s)])

    found = read_heard(store, "ages", now_ns=NOW_NS)

    assert found is not None
    assert (found.num_ranks, found.num_recent, found.num_silent) == (6, 2, 2)
    assert [(one.rank, one.age_ns) for one in found.silent] == [
        (5, 400 * S),
        (4, 15_100_000_000),
    ]


def test_a_rank_is_as_its_newest_heartbeat_of_the_newest_epoch_says(store: Store) -> None:
    store.insert_rows(
        "heartbeats",
        [
            beat("moved", 0, age_s=900, host="old", epoch=0),
            beat("moved", 7, age_s=900, host="gone", epoch=0),
            beat("moved", 0, age_s=60, host="a", step=41, epoch=1),
            beat("moved", 0, age_s=50, host="b", step=-1, state="starting", epoch=1),
            beat("moved", 1, age_s=1, epoch=1),
            beat("moved", 2, age_s=80, state="ended", epoch=1),
        ],
    )

    assert read_heard(store, "moved", now_ns=NOW_NS) == RankLiveness(
        num_ranks=2,
        num_recent=1,
        num_silent=1,
        silent=(SilentRank(rank=0, host="b", state="starting", step=None, age_ns=50 * S),),
    )


def test_of_12288_ranks_the_ten_longest_silences_are_returned(store: Store) -> None:
    rows = [beat("large", rank, age_s=1 if rank % 3 else 20 + rank) for rank in range(12_288)]
    store.insert_rows("heartbeats", rows)

    found = read_heard(store, "large", now_ns=NOW_NS)

    assert found is not None
    assert (found.num_ranks, found.num_recent, found.num_silent) == (12_288, 8_192, 4_096)
    assert [one.rank for one in found.silent] == [12_285 - 3 * place for place in range(10)]

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankscope.analysis.report.liveness import RankLiveness, SilentRank
from rankscope.server.rank_view import read_liveness

if TYPE_CHECKING:
    from rankscope.collector.identity import Row
    from rankscope.collector.store.store import Store

S = 1_000_000_000
NOW_NS = 1_900_000_000 * S


def heartbeat(run_id: str, rank: int, *, age_s: float, **changes: Any) -> Row:  # noqa: ANN401
    row = {
        "run_id": run_id, "rank": rank, "host": f"node-{rank // 8}", "pid": 7, "step": 40,
        "at_ns": NOW_NS - int(age_s * S), "state": "training", "epoch": 0,
    }  # fmt: skip
    return row | changes


def test_without_heartbeats_the_liveness_is_unknown(store: Store) -> None:
    assert read_liveness(store, "unknown", now_ns=NOW_NS) is None


def test_ranks_are_recent_up_to_5_s_and_silent_after_15_s(store: Store) -> None:
    ages_s = (0, 5, 5.1, 15, 15.1, 400)
    store.insert_rows(
        "heartbeats", [heartbeat("ages", r, age_s=age) for r, age in enumerate(ages_s)]
    )

    found = read_liveness(store, "ages", now_ns=NOW_NS)

    assert found is not None
    assert (found.num_ranks, found.num_recent, found.num_silent) == (6, 2, 2)
    assert [(one.rank, one.age_ns) for one in found.silent] == [
        (5, 400 * S),
        (4, 15_100_000_000),
    ]


def test_only_the_newest_heartbeat_of_the_newest_epoch_counts(store: Store) -> None:
    store.insert_rows(
        "heartbeats",
        [
            heartbeat("moved", 0, age_s=900, host="old", epoch=0),
            heartbeat("moved", 7, age_s=900, host="gone", epoch=0),
            heartbeat("moved", 0, age_s=60, host="a", step=41, epoch=1),
            heartbeat("moved", 0, age_s=50, host="b", step=-1, state="starting", epoch=1),
            heartbeat("moved", 1, age_s=1, epoch=1),
            heartbeat("moved", 2, age_s=80, state="ended", epoch=1),
        ],
    )

    assert read_liveness(store, "moved", now_ns=NOW_NS) == RankLiveness(
        num_ranks=2,
        num_recent=1,
        num_silent=1,
        silent=(SilentRank(rank=0, host="b", state="starting", step=None, age_ns=50 * S),),
    )


def test_of_12288_ranks_the_ten_longest_silences_are_returned(store: Store) -> None:
    rows = [heartbeat("large", rank, age_s=1 if rank % 3 else 20 + rank) for rank in range(12_288)]
    store.insert_rows("heartbeats", rows)

    found = read_liveness(store, "large", now_ns=NOW_NS)

    assert found is not None
    assert (found.num_ranks, found.num_recent, found.num_silent) == (12_288, 8_192, 4_096)
    assert [one.rank for one in found.silent] == [12_285 - 3 * place for place in range(10)]

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rankscope.collector.http.tokens import Role
from rankscope.collector.ingest.router import ARROW_TYPE
from rankscope.collector.read.runs import read_events, read_run
from rankscope.collector.store.deduplicated_reads import read_stored_spans
from rankscope.collector.wire.codec import encode_cuts
from tests.support.collector.cut_builder import SEGMENT, span_cut
from tests.support.collector.serving import OWN, serving, tokens_for
from tests.support.collector.stored import shown
from tests.support.collector.writing import other_collector

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.collector.spool.cut import Cut
    from rankscope.collector.store.store import Store
    from tests.support.collector.serving import Collector


@pytest.fixture(scope="module")
def collector(store: Store) -> Iterator[Collector]:
    with serving(store) as served:
        yield served


def states(answer: Any) -> list[str]:  # noqa: ANN401 -- httpx's
    assert answer.status_code in {200, 409, 410}, answer.text
    return [cut["state"] for cut in answer.json()["cuts"]]


@pytest.mark.slow
def test_acknowledged_cuts_can_be_read(collector: Collector, store: Store, run_id: str) -> None:
    answer = collector.ship(span_cut(run_id, 0, 3), span_cut(run_id, 3, 5))

    assert answer.status_code == 200
    assert answer.json() == {
        "schema": 1,
        "cuts": [
            {"segment": SEGMENT, "first_row": 0, "state": "stored"},
            {"segment": SEGMENT, "first_row": 3, "state": "stored"},
        ],
    }
    assert shown(store, run_id) == ["s0", "s1", "s2", "s3", "s4"]
    assert not read_stored_spans(store, run_id).has_repeated


def test_a_repeated_body_changes_nothing(collector: Collector, store: Store, run_id: str) -> None:
    cut = span_cut(run_id, 0, 3)
    assert states(collector.ship(cut)) == ["stored"]

    for _ in range(20):
        assert states(collector.ship(cut)) == ["duplicate"]
    assert states(collector.ship(cut, span_cut(run_id, 3, 4))) == ["duplicate", "stored"]

    assert shown(store, run_id) == ["s0", "s1", "s2", "s3"]


def test_other_bytes_under_the_same_key_are_409_and_an_event(
    collector: Collector, store: Store, run_id: str
) -> None:
    forged = span_cut(run_id, 0, 3, names=["x", "y", "z"], content="other")
    collector.ship(span_cut(run_id, 0, 3))

    alone = collector.ship(forged)
    among_others = collector.ship(forged, span_cut(run_id, 3, 4))

    assert (alone.status_code, states(alone)) == (409, ["conflict"])
    assert (among_others.status_code, states(among_others)) == (200, ["conflict", "stored"])
    assert shown(store, run_id) == ["s0", "s1", "s2", "s3"]
    (event,) = read_events(store, run_id)
    assert (event["kind"], event["rank"]) == ("conflict", 0)
    assert "rows 0 to 3" in event["text"]


@pytest.mark.slow
def test_concurrent_requests_share_inserts(store: Store, run_id: str) -> None:
    cuts = [span_cut(run_id, at * 10, at * 10 + 10) for at in range(40)]

    async def all_at_once(served: Collector) -> list[int]:
        headers = {"authorization": f"Bearer {OWN}", "content-type": ARROW_TYPE}
        async with served.visitor() as visitor:
            asked = [
                visitor.post("/v1/spans", content=encode_cuts([cut]), headers=headers)
                for cut in [*cuts, *cuts]
            ]
            return [answer.status_code for answer in await asyncio.gather(*asked)]

    with serving(store) as served:
        assert asyncio.run(all_at_once(served)) == [200] * 80
        assert served.service.commit.num_inserts["spans"] < 40

    assert len(shown(store, run_id)) == 400
    assert not read_stored_spans(store, run_id).has_repeated


# --- owners of runs


@pytest.mark.slow
def test_a_token_for_some_runs_reaches_no_other(store: Store, run_id: str, tmp_path: Path) -> None:
    tokens, by = tokens_for(tmp_path, team=(Role.INGEST, f"{run_id}-a"))
    with serving(store, tokens=tokens) as served:
        own = served.ship(span_cut(f"{run_id}-a1", 0, 3), token=by["team"])
        other = served.ship(
            span_cut(f"{run_id}-a1", 3, 5), span_cut(f"{run_id}-b", 0, 3), token=by["team"]
        )
        described = served.rows(
            "runs", [{"run_id": f"{run_id}-b", "epoch": 0, "revision": 1}], token=by["team"]
        )
        resumed = served.resume(run_id=f"{run_id}-b", token=by["team"])

    assert own.status_code == 200
    assert (other.status_code, described.status_code, resumed.status_code) == (403, 403, 403)
    assert shown(store, f"{run_id}-a1") == ["s0", "s1", "s2"]
    assert shown(store, f"{run_id}-b") == []


@pytest.mark.slow
def test_a_run_belongs_to_its_first_writer(store: Store, run_id: str, tmp_path: Path) -> None:
    holders = {"red_at_host1": (Role.INGEST, ""), "red_at_host2": (Role.INGEST, "")}
    tokens, by = tokens_for(tmp_path, **holders, blue=(Role.INGEST, ""), root=(Role.ADMIN, ""))
    cuts = [span_cut(run_id, at, at + 1) for at in range(5)]
    with serving(store, tokens=tokens) as served:
        assert states(served.ship(cuts[0], token=by["red_at_host1"])) == ["stored"]
        assert states(served.ship(cuts[1], token=by["red_at_host2"])) == ["stored"]
        refused = served.ship(cuts[2], token=by["blue"])
        described = served.rows(
            "runs", [{"run_id": run_id, "epoch": 0, "revision": 1}], token=by["blue"]
        )
        assert states(served.ship(cuts[3], token=by["root"])) == ["stored"]
    with serving(store, tokens=tokens) as served:  # owners are kept over a restart
        assert served.ship(cuts[2], token=by["blue"]).status_code == 409
        assert states(served.ship(cuts[4], token=by["red_at_host1"])) == ["stored"]

    assert (refused.status_code, states(refused)) == (409, ["conflict"])
    assert described.status_code == 409
    assert shown(store, run_id) == ["s0", "s1", "s3", "s4"]


def test_a_deleted_run_takes_no_rows_and_answers_410(store: Store, run_id: str) -> None:
    gone = f"{run_id}-gone"
    with serving(store, is_deleted=lambda name: name == gone) as served:
        alone = served.ship(span_cut(gone, 0, 3))
        among_others = served.ship(span_cut(gone, 0, 3), span_cut(run_id, 0, 2))
        described = served.rows("runs", [{"run_id": gone, "epoch": 0, "revision": 1}])

    assert (alone.status_code, states(alone)) == (410, ["deleted"])
    assert (among_others.status_code, states(among_others)) == (200, ["deleted", "stored"])
    assert described.status_code == 410
    assert (shown(store, gone), shown(store, run_id)) == ([], ["s0", "s1"])


# --- bad rows


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("duration_ns", -1, "ends before it begins"),
        ("duration_ns", 2**63 - 1, "lasts more than 30 days"),
        ("start_ns", -1, "begins before the clock"),
        ("start_ns", 2**63 - 1, "begins beyond the clock's range"),
        ("row", 99, "row outside its cut"),
        ("row", 0, "row given twice"),
    ],
)
def test_an_impossible_row_becomes_a_bad_row_and_the_others_are_kept(
    collector: Collector, store: Store, run_id: str, column: str, value: int, reason: str
) -> None:
    good = span_cut(run_id, 0, 3)
    numbers = good.rows.spans[column].to_numpy().copy()
    numbers[1] = value

    changed: dict[str, Any] = {column: numbers}
    answer = collector.ship(span_cut(run_id, 0, 3, **changed), span_cut(run_id, 3, 4))

    assert states(answer) == ["stored", "stored"]
    assert shown(store, run_id) == ["s0", "s2", "s3"]
    store.insert_rows("runs", [{"run_id": run_id, "epoch": 0, "revision": 1}])
    described = read_run(store, run_id)
    assert described.bad == [{"reason": reason, "num_rows": 1}]
    assert [(row["num_spans"], row["num_bad"]) for row in described.account] == [(3, 1)]


def test_hostile_names_are_stored_escaped_and_short(
    collector: Collector, store: Store, run_id: str
) -> None:
    hostile = ["\x1b[31mred\r\n", "\u202edrowssap", "null\0byte", "😀 ünïcödé", "n" * 2**20, ""]
    collector.ship(span_cut(run_id, 0, 6, names=hostile))

    names = shown(store, run_id)

    assert "\\x1b[31mred\\r\\n" in names
    assert "\\u202edrowssap" in names
    assert "null\\x00byte" in names
    assert "😀 ünïcödé" in names
    assert max(len(name.encode()) for name in names) == 256
    assert all(name.isprintable() for name in names)


def test_a_span_of_an_unknown_kind_becomes_a_bad_row(
    collector: Collector, store: Store, run_id: str
) -> None:
    cut = span_cut(run_id, 0, 2)
    spans = cut.rows.spans
    odd = spans.set_column(
        spans.schema.get_field_index("kind"), "kind", spans["name"]
    )  # "s0" and "s1" are not kinds
    answer = collector.ship(replace(cut, rows=replace(cut.rows, spans=odd)))

    assert states(answer) == ["stored"]
    assert shown(store, run_id) == []


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": "../etc"},
        {"run_id": "x" * 129},
        {"process": ""},
        {"process": "a b"},
        {"epoch": -1},
        {"rank": -2},
        {"end_row": 0},
    ],
    ids=str,
)
def test_a_cut_with_an_invalid_key_is_rejected(
    collector: Collector, run_id: str, change: dict[str, Any]
) -> None:
    cut = span_cut(run_id, 0, 2)

    answer = collector.ship(replace(cut, key=replace(cut.key, **change)))

    assert answer.status_code == 422, answer.text


# --- two collectors


@pytest.mark.slow
def test_two_collectors_with_overlapping_bodies_show_each_row_once(
    store: Store, run_id: str
) -> None:
    rng = np.random.default_rng(7)
    cuts = [span_cut(run_id, at * 5, at * 5 + 5) for at in range(20)]

    async def both(one: Collector, two: Collector) -> set[int]:
        headers = {"authorization": f"Bearer {OWN}", "content-type": ARROW_TYPE}
        async with one.visitor() as first, two.visitor() as second:
            asked = []
            for visitor in (first, second):
                for _ in range(8):
                    some: list[Cut] = [cuts[at] for at in rng.choice(20, size=6, replace=False)]
                    body = encode_cuts(some)
                    asked.append(visitor.post("/v1/spans", content=body, headers=headers))
            asked += [
                visitor.post("/v1/spans", content=encode_cuts(cuts), headers=headers)
                for visitor in (first, second)
            ]
            return {answer.status_code for answer in await asyncio.gather(*asked)}

    with (
        serving(store, writer=other_collector(store)) as one,
        serving(store, writer=other_collector(store)) as two,
    ):
        assert asyncio.run(both(one, two)) == {200}

    assert shown(store, run_id) == sorted(f"s{row}" for row in range(100))


def test_rows_that_a_sender_silently_left_out_count_as_torn(
    collector: Collector, store: Store, run_id: str
) -> None:
    # GIVEN a cut of rows 0 to 9 that has the first three only
    cut = span_cut(run_id, 0, 3)
    cut = replace(cut, key=replace(cut.key, end_row=10))

    assert states(collector.ship(cut)) == ["stored"]

    account = store.rows(
        "SELECT num_spans, num_torn FROM ledger FINAL WHERE run_id = {run_id:String}",
        {"run_id": run_id},
    )
    assert account == [{"num_spans": 3, "num_torn": 7}]


@pytest.mark.slow
def test_a_row_without_a_rank_becomes_a_bad_row(
    collector: Collector, store: Store, run_id: str
) -> None:
    # GIVEN a cut of several ranks whose rows have no rank
    assert states(collector.ship(span_cut(run_id, 0, 2, rank=-1))) == ["stored"]

    found = store.rows(
        "SELECT row, reason FROM bad_rows WHERE run_id = {run_id:String} ORDER BY row",
        {"run_id": run_id},
    )
    assert found == [{"row": 0, "reason": "of no rank"}, {"row": 1, "reason": "of no rank"}]
    assert shown(store, run_id) == []


@pytest.mark.slow
def test_a_cut_of_a_rank_beyond_any_world_is_refused(collector: Collector, run_id: str) -> None:
    assert collector.ship(span_cut(run_id, 0, 2, rank=(1 << 24) - 1)).status_code == 200
    answer = collector.ship(span_cut(run_id, 0, 2, rank=1 << 24))

    assert answer.status_code == 422
    assert f"rank {1 << 24}" in answer.text

"""The way from a spool to a collector that works, fails, or rejects."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.identity import segment_id
from tests.faults.checker import Oracle, check
from tests.support.collector.agent_rig import Rig, state_of, write_ended, write_spans
from tests.support.collector.fake_collector import FakeCollector, Reply, rejection
from tests.support.collector.spool_builder import SpoolBuilder
from tests.support.ports import fixed_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.faults.checker import Verdict


@pytest.fixture
def collector() -> Iterator[FakeCollector]:
    with FakeCollector() as started:
        yield started


def verdict_of(collector: FakeCollector, tmp_path: Path, **account: int) -> Verdict:
    return check(tmp_path / "oracle", collector.stored.rows, **account)


def test_all_rows_and_descriptions_arrive_once_and_segments_are_deleted(
    collector: FakeCollector, oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    ranks = [SpoolBuilder(spool, run_id="run", rank=rank) for rank in range(2)]
    for builder in ranks:
        write_spans(builder, oracle, 150)
        builder.end()
    rig = Rig(spool, collector.url)

    rig.turn_until(lambda: len(collector.stored.rows) == 300)
    rig.turn()

    assert verdict_of(collector, tmp_path).is_clean
    states = {row["rank"]: row["exit_state"] for row in collector.stored.described["ranks"]}
    assert states == {0: "ended", 1: "ended"}
    assert {row["state"] for row in collector.stored.described["runs"]} >= {"ended"}
    assert not list(spool.glob("run/*/seg-*"))


def test_small_segments_of_many_ranks_are_sent_in_one_request(
    collector: FakeCollector, oracle: Oracle, spool: Path
) -> None:
    for rank in range(20):
        write_ended(spool, oracle, 3, rank=rank)
    rig = Rig(spool, collector.url)

    rig.turn_until(lambda: len(collector.stored.rows) == 60)

    assert collector.num_requests("/v1/spans") == 1


def test_a_lost_answer_loses_and_duplicates_no_row(
    collector: FakeCollector, oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    write_ended(spool, oracle, 40)
    answers = iter([Reply(status=500), Reply(status=502)])
    collector.after_storing = lambda: next(answers, None)
    rig = Rig(spool, collector.url)

    rig.turn_until(lambda: not rig.journal.unanswered("run") and bool(collector.stored.rows))

    assert collector.num_requests("/v1/spans") == 3
    assert verdict_of(collector, tmp_path).is_clean


def test_a_restarted_agent_continues_where_the_last_one_stopped(
    collector: FakeCollector, oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    # GIVEN an agent that ended after its cut was stored and before it was acknowledged
    builder = SpoolBuilder(spool, run_id="run")
    write_spans(builder, oracle, 40)
    collector.after_storing = lambda: Reply(status=503)
    first = Rig(spool, collector.url)
    first.turn_until(lambda: bool(collector.stored.rows))
    first.close()

    # WHEN more is written and another agent starts
    collector.after_storing = lambda: None
    write_spans(builder, oracle, 20)
    builder.end()
    second = Rig(spool, collector.url)
    second.turn_until(lambda: len(collector.stored.rows) >= 60)

    # THEN it sent the old cut again unchanged, and then the rest
    assert verdict_of(collector, tmp_path).is_clean


def test_an_agent_that_lost_its_journal_asks_the_collector(
    collector: FakeCollector, oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    builder = SpoolBuilder(spool, run_id="run")
    write_spans(builder, oracle, 40)
    first = Rig(spool, collector.url)
    first.turn_until(lambda: bool(collector.stored.rows))
    first.close()
    (state_of(spool) / "journal.db").unlink()

    write_spans(builder, oracle, 10)
    builder.end()
    second = Rig(spool, collector.url)
    second.turn_until(lambda: len(collector.stored.rows) >= 50)

    assert verdict_of(collector, tmp_path).is_clean


def test_the_agent_asks_page_by_page_for_its_own_ranks_only(
    collector: FakeCollector, oracle: Oracle, spool: Path
) -> None:
    builders = [SpoolBuilder(spool, run_id="run", rank=rank) for rank in (3, 5)]
    for builder in builders:
        write_spans(builder, oracle, 6)
        builder.end()
    ids = [segment_id(builder.process.hex, 0) for builder in builders]
    pages = iter(
        [
            {"end_rows": {str(ids[0]): 6}, "unanswered": [], "source_format": None, "next": 7},
            {"end_rows": {str(ids[1]): 4}, "unanswered": [], "source_format": None, "next": None},
        ]
    )
    collector.misbehave = lambda path, _: (
        Reply(status=200, document=next(pages)) if path == "/v1/resume" else None
    )
    rig = Rig(spool, collector.url)
    rig.turn_until(lambda: bool(collector.stored.rows))
    rig.turn()

    asked = [path for _, path in collector.requests if path.startswith("/v1/resume")]
    assert asked == [
        "/v1/resume?run_id=run&rank=3&rank=5&after=0",
        "/v1/resume?run_id=run&rank=3&rank=5&after=7",
    ]
    assert sorted((key[3], key[4]) for key, _ in collector.stored.rows) == [
        (str(ids[1]), "4"),
        (str(ids[1]), "5"),
    ]


def test_an_outage_loses_nothing_and_is_logged_once(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    port = fixed_port()
    builder = SpoolBuilder(spool, run_id="run")
    write_spans(builder, oracle, 40)
    rig = Rig(spool, f"http://localhost:{port}")
    for _ in range(20):
        rig.turn()
    assert len(rig.lines) == 1
    assert rig.lines[0].startswith("the collector: ")

    write_spans(builder, oracle, 24)
    builder.end()
    with FakeCollector(port=port) as back:
        rig.turn_until(lambda: len(back.stored.rows) >= 64)
        rig.turn()

        assert verdict_of(back, tmp_path).is_clean
    assert len(rig.lines) == 2
    assert "works again after" in rig.lines[1]


@pytest.mark.slow
def test_one_rejected_cut_of_a_hundred_becomes_a_dead_letter_and_the_others_arrive(
    collector: FakeCollector, oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    from tests.support.collector.kept_cuts import decode_cuts

    for rank in range(100):
        write_ended(spool, oracle, 2, rank=rank)

    def reject_one(path: str, body: bytes) -> Reply | None:
        if path == "/v1/spans" and any(cut.key.rank == 37 for cut in decode_cuts(body)):
            return rejection(422, "row 1: no")
        return None

    collector.misbehave = reject_one
    rig = Rig(spool, collector.url)
    rig.turn_until(lambda: len(collector.stored.rows) >= 198)
    for _ in range(3):
        rig.turn()

    assert verdict_of(collector, tmp_path, num_dropped=2).is_clean
    (letter,) = (state_of(spool) / "dead").glob("*.json")
    document = json.loads(letter.read_text())
    assert (document["status"], document["reason"], document["rank"]) == (422, "row 1: no", 37)
    (kept,) = decode_cuts(letter.with_suffix(".body").read_bytes())
    assert (kept.key.rank, kept.rows.spans.num_rows) == (37, 2)
    newest = [row for row in collector.stored.described["ranks"] if row["rank"] == 37][-1]
    assert newest["dropped"] == {"refused": 2}


def test_a_single_cut_is_rejected_three_times_before_it_is_a_dead_letter(
    collector: FakeCollector, oracle: Oracle, spool: Path
) -> None:
    write_ended(spool, oracle, 2)
    collector.misbehave = lambda path, _: rejection(400) if path == "/v1/spans" else None
    rig = Rig(spool, collector.url)

    rig.turn_until((state_of(spool) / "dead").exists)
    rig.turn()

    assert collector.num_requests("/v1/spans") == 3


@pytest.mark.slow
def test_a_collector_that_rejects_everything_does_not_empty_the_spool(
    collector: FakeCollector, oracle: Oracle, spool: Path
) -> None:
    for rank in range(100):
        write_ended(spool, oracle, 1, rank=rank)
    collector.misbehave = lambda path, _: rejection(400) if path == "/v1/spans" else None
    rig = Rig(spool, collector.url)

    for _ in range(5):
        rig.turn()

    assert 8 <= len(list((state_of(spool) / "dead").glob("*.json"))) <= 9
    assert any("rejects everything" in line for line in rig.lines)


def test_a_cut_stored_before_with_other_content_becomes_a_dead_letter(
    collector: FakeCollector, oracle: Oracle, spool: Path
) -> None:
    builders = [SpoolBuilder(spool, run_id="run", rank=rank) for rank in range(2)]
    for builder in builders:
        write_spans(builder, oracle, 4)
    rig = Rig(spool, collector.url)
    rig.turn_until(lambda: len(collector.stored.rows) >= 8)
    # The last row may come in a cut of its own.
    collector.stored.cuts = {
        (run, segment, first, end): "another"
        for run, segment, _, _ in collector.stored.cuts
        for first, end in itertools.combinations(range(5), 2)
    }
    rig.close()
    (state_of(spool) / "journal.db").unlink()
    collector.misbehave = lambda path, _: (
        Reply(status=200, document={"end_rows": {}, "unanswered": [], "source_format": None})
        if path == "/v1/resume"
        else None
    )

    again = Rig(spool, collector.url)
    again.turn_until(lambda: len(list((state_of(spool) / "dead").glob("*.json"))) >= 2)

    assert any("stored before with other content" in line for line in again.lines)


def test_a_deleted_run_is_dropped_and_others_continue(
    collector: FakeCollector, oracle: Oracle, spool: Path
) -> None:
    from tests.support.collector.kept_cuts import decode_cuts

    for run_id in ("gone", "kept"):
        write_ended(spool, oracle, 4, run_id=run_id)

    def deleted(path: str, body: bytes) -> Reply | None:
        is_gone = path == "/v1/spans" and decode_cuts(body)[0].key.run_id == "gone"
        return Reply(status=410, document={"schema": 1, "cuts": []}) if is_gone else None

    collector.misbehave = deleted
    rig = Rig(spool, collector.url)
    rig.turn_until(lambda: len(collector.stored.rows) == 4)
    rig.turn()

    assert [line for line in rig.lines if "deleted" in line] == [
        "run gone was deleted at the collector: nothing more of it is sent"
    ]
    assert not list(spool.glob("gone/*/seg-*"))
    assert not (state_of(spool) / "dead").exists()


def test_a_run_that_the_token_does_not_cover_delays_no_other(
    collector: FakeCollector, oracle: Oracle, spool: Path
) -> None:
    from tests.support.collector.kept_cuts import decode_cuts

    for run_id in ("a-foreign", "own"):
        write_ended(spool, oracle, 4, run_id=run_id)

    def scoped(path: str, body: bytes) -> Reply | None:
        is_foreign = path == "/v1/spans" and decode_cuts(body)[0].key.run_id == "a-foreign"
        return Reply(status=403) if is_foreign else None

    collector.misbehave = scoped
    rig = Rig(spool, collector.url)
    for _ in range(4):
        rig.turn()

    assert {key[0] for key, _ in collector.stored.rows} == {"own"}
    assert list(spool.glob("a-foreign/*/seg-*"))
    assert [line.partition(":")[0] for line in rig.lines] == ["run a-foreign"]


def test_data_that_is_too_new_for_the_collector_stays_in_the_spool(
    collector: FakeCollector, oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    write_ended(spool, oracle, 4)
    too_old = Reply(
        status=422, document={"schema": 1, "error": "version 1, I read 0 to 0", "supported": [0, 0]}
    )
    collector.misbehave = lambda path, _: too_old if path == "/v1/spans" else None
    rig = Rig(spool, collector.url)
    for _ in range(6):
        rig.turn()
    assert not (state_of(spool) / "dead").exists()

    collector.misbehave = lambda _path, _body: None
    rig.turn_until(lambda: len(collector.stored.rows) == 4)

    assert verdict_of(collector, tmp_path).is_clean


def test_one_rejected_description_becomes_a_dead_letter_and_the_others_arrive(
    collector: FakeCollector, oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    for rank in range(5):
        write_ended(spool, oracle, 4, rank=rank)

    def reject_rank(path: str, body: bytes) -> Reply | None:
        is_rejected = path == "/v1/rows/ranks" and b'"rank": 3' in body
        return rejection(422, "row 3, host: no") if is_rejected else None

    collector.misbehave = reject_rank
    rig = Rig(spool, collector.url)
    rig.turn_until(lambda: len(collector.stored.rows) == 20)
    for _ in range(2):
        rig.turn()

    assert verdict_of(collector, tmp_path).is_clean
    assert {row["rank"] for row in collector.stored.described["ranks"]} == {0, 1, 2, 4}
    letters = [json.loads(path.read_text()) for path in (rig.state / "dead").glob("ranks-*.json")]
    assert {(document["status"], document["reason"]) for document in letters} == {
        (422, "row 3, host: no")
    }

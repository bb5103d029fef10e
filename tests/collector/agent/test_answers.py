"""The agent before a collector that answers wrongly, or asks it to wait: all arrives, once."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.agent.retry import LONGEST_ASKED_S, Backoff
from tests.support.collector.agent_rig import Rig, assert_clean, write_spans
from tests.support.collector.fake_collector import TOKEN, FakeCollector, Reply
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.checker import Oracle


@pytest.mark.parametrize(
    "reply",
    [
        Reply(status=500, body=b"<html>oops</html>"),
        Reply(status=200, body=b"<html>welcome</html>"),
        Reply(status=200, document={"cuts": []}),
        Reply(status=200, document={"cuts": [{"segment": 1, "first_row": 0, "state": "stored"}]}),
        Reply(status=200, document=[1, 2]),
        Reply(status=204, body=b""),
        Reply(status=302, headers={"location": "http://169.254.169.254/"}),
        Reply(status=404),
        Reply(status=429, headers={"retry-after": "1"}),
        Reply(status=503, headers={"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}),
        Reply(status=503, headers={"retry-after": "never"}),
        Reply(status=200, body=b"[" * 100_000),
    ],
)
def test_no_answer_but_the_right_one_counts_as_an_acknowledgement(
    reply: Reply, oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    with FakeCollector() as collector:
        collector.misbehave = lambda path, _: reply if path == "/v1/spans" else None
        builder = SpoolBuilder(spool, run_id="run")
        write_spans(builder, oracle, 20)
        builder.end()
        rig = Rig(spool, collector.url)
        for _ in range(4):
            rig.turn()
        assert rig.outbox.num_rows_settled == 0
        assert list(spool.glob("run/*/seg-*"))
        assert not (rig.state / "dead").exists()

        collector.misbehave = lambda _path, _body: None
        rig.turn_until(lambda: len(collector.stored.rows) >= 20)

        assert_clean(tmp_path, collector.stored)
        rig.close()


STRANGERS = [
    Reply(status=200, document={"status": "ok"}),
    Reply(status=200, document={"schema": 1, "num_rows": 0}),
    Reply(status=200, document=[]),
    Reply(status=410, body=b"<html>gone</html>"),
    Reply(status=410, document={"message": "Gone"}),
    Reply(status=400, body=b"<html>The plain HTTP request was sent to HTTPS port</html>"),
    Reply(status=413, body=b"<html>Request Entity Too Large</html>"),
    Reply(status=422, document={"detail": [{"type": "missing"}]}),
]
"""What a balancer, a gateway or a sign-in page may answer in a collector's place."""


@pytest.mark.parametrize("reply", STRANGERS)
@pytest.mark.parametrize("where", ["/v1/rows/", "/v1/spans", "/v1/resume"])
def test_nothing_is_given_up_on_the_word_of_a_stranger(
    where: str, reply: Reply, oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    with FakeCollector() as collector:
        collector.misbehave = lambda path, _: reply if path.startswith(where) else None
        builder = SpoolBuilder(spool, run_id="run")
        builder.group(5, kind="dp", name="dp", members=[0, 1])
        write_spans(builder, oracle, 20)
        builder.end()
        rig = Rig(spool, collector.url)
        for _ in range(4):
            rig.turn()
        assert list(spool.glob("run/*/seg-*"))
        assert not any("deleted" in line for line in rig.lines)
        assert not (rig.state / "dead").exists()
        assert rig.lines

        collector.misbehave = lambda _path, _body: None
        rig.turn_until(lambda: not list(spool.glob("run/*/seg-*")))

        assert_clean(tmp_path, collector.stored)
        assert {"runs", "ranks", "groups", "manifests"} <= collector.stored.described.keys()
        rig.close()


def test_a_proxy_that_lets_only_small_bodies_through_gets_smaller_ones(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    most, lengths = 10_000, []
    too_large = Reply(status=413, body=b"<html>Request Entity Too Large</html>")
    for rank in range(60):
        builder = SpoolBuilder(spool, run_id="run", rank=rank)
        write_spans(builder, oracle, 20)
        builder.end()

    def refuse_long(path: str, body: bytes) -> Reply | None:
        if path == "/v1/spans":
            lengths.append(len(body))
        return too_large if len(body) > most else None

    with FakeCollector() as collector:
        collector.misbehave = refuse_long
        rig = Rig(spool, collector.url)
        rig.turn_until(lambda: not list(spool.glob("run/*/seg-*")))

        assert max(lengths) > most
        assert_clean(tmp_path, collector.stored)
        assert not (rig.state / "dead").exists()
        rig.close()


def test_a_pause_that_was_asked_for_is_kept_and_no_request_falls_into_it(
    oracle: Oracle, spool: Path
) -> None:
    with FakeCollector() as collector:
        busy = Reply(status=503, headers={"retry-after": "20"})
        collector.misbehave = lambda path, _: busy if path == "/v1/spans" else None
        builder = SpoolBuilder(spool, run_id="run")
        write_spans(builder, oracle, 4)
        rig = Rig(spool, collector.url)
        rig.turn_until(lambda: collector.num_requests("/v1/spans") == 1)
        asked_s = rig.pauses.now_s
        rig.turn_until(lambda: collector.num_requests("/v1/spans") == 2)

        assert 20 <= rig.pauses.now_s - asked_s <= 27
        rig.close()


def test_a_token_that_is_replaced_is_taken_up_and_nothing_is_lost(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    # GIVEN a token that has expired
    file = tmp_path / "token"
    file.write_text("expired\n")
    file.chmod(0o600)
    with FakeCollector() as collector:
        builder = SpoolBuilder(spool, run_id="run")
        write_spans(builder, oracle, 20)
        builder.end()
        rig = Rig(spool, collector.url, environment={"RANKSCOPE_TOKEN_FILE": str(file)})
        begun_s = rig.pauses.now_s
        rig.turn()
        while rig.pauses.now_s - begun_s < 59:
            rig.turn()
        # THEN the collector is asked once a minute
        assert len(collector.requests) == 1

        # WHEN it is replaced, nobody waits for the minute to end
        file.write_text(TOKEN)
        before_s = rig.pauses.now_s
        rig.turn_until(lambda: len(collector.stored.rows) >= 20)

        assert rig.pauses.now_s - before_s < 10
        assert_clean(tmp_path, collector.stored)
        assert [line.partition(":")[0] for line in rig.lines] == ["the collector"] * 2
        assert TOKEN not in "".join(rig.lines)
        rig.close()


def test_a_token_that_is_replaced_while_a_request_is_under_way_is_taken_up(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("expired\n")
    file.chmod(0o600)
    with FakeCollector() as collector:

        def refuse(_path: str, _body: bytes) -> Reply:
            file.write_text(TOKEN)
            collector.misbehave = lambda _path, _body: None
            return Reply(status=401)

        collector.tokens.add("expired")
        collector.misbehave = refuse
        write_spans(SpoolBuilder(spool, run_id="run"), oracle, 5)
        rig = Rig(spool, collector.url, environment={"RANKSCOPE_TOKEN_FILE": str(file)})
        before_s = rig.pauses.now_s
        rig.turn_until(lambda: len(collector.stored.rows) >= 4)  # the newest row waits

        assert rig.pauses.now_s - before_s < 10  # not the minute's end
        rig.close()


@pytest.mark.parametrize("content", ["", "two words", "\x00\xff", "x" * 10_000])
def test_a_token_file_that_holds_none_is_waited_for(
    content: str, oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(0o600)
    with FakeCollector() as collector:
        builder = SpoolBuilder(spool, run_id="run")
        write_spans(builder, oracle, 5)
        builder.end()
        rig = Rig(spool, collector.url, environment={"RANKSCOPE_TOKEN_FILE": str(file)})
        rig.turn()
        assert collector.requests == []
        file.write_text(TOKEN)
        before_s = rig.pauses.now_s
        rig.turn_until(lambda: len(collector.stored.rows) >= 5)

        assert rig.pauses.now_s - before_s < 10  # not the minute's end
        assert_clean(tmp_path, collector.stored)
        rig.close()


def test_a_trouble_that_becomes_another_is_told_with_its_own_reason(
    oracle: Oracle, spool: Path
) -> None:
    # GIVEN a collector that is away, then refuses the token, and is away again
    with FakeCollector() as collector:
        write_spans(SpoolBuilder(spool, run_id="run"), oracle, 5)
        rig = Rig(spool, collector.url)
        statuses = [502, 502, 401, 502]
        collector.misbehave = lambda _path, _body: (
            Reply(status=statuses.pop(0)) if statuses else None
        )
        rig.turn_until(lambda: len(collector.stored.rows) >= 4)

        # THEN each reason is told once, and the end
        told = [line.partition(": ")[2].partition(";")[0] for line in rig.lines]
        assert told[0] == "the collector answers 502"
        assert told[1].startswith("the collector does not know the token")
        assert told[2].startswith("works again after")
        assert len(told) == 3
        rig.close()


def test_sixty_four_agents_do_not_come_back_together() -> None:
    # GIVEN 64 agents that lose their collector at once and try for two minutes
    chooser = random.Random(5)
    tries = [0] * 121
    for _ in range(64):
        backoff, now_s = Backoff(uniform=chooser.uniform), 0.0
        while now_s <= 120:
            tries[int(now_s)] += 1
            now_s += backoff.failed()

    # THEN after the first seconds no second sees more than half of them, and each of them
    # tries once in five seconds
    assert max(tries[20:]) <= 32
    assert sum(tries[60:]) / 64 <= 14


def test_agents_that_were_told_the_same_time_come_back_apart() -> None:
    chooser = random.Random(5)
    pauses_s = [Backoff(uniform=chooser.uniform).failed(20.0) for _ in range(64)]

    assert min(pauses_s) >= 20
    assert max(pauses_s) - min(pauses_s) >= 4
    assert Backoff(uniform=lambda low, _: low).failed(1e9) == LONGEST_ASKED_S

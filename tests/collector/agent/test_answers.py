"""The agent with a collector that gives wrong answers or asks it to wait: all rows arrive once."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.agent.retry import LONGEST_RETRY_AFTER_S, Backoff
from tests.support.collector.agent_rig import (
    Rig,
    any_settled,
    assert_clean,
    write_ended,
    write_spans,
)
from tests.support.collector.fake_collector import TOKEN, FakeCollector, Reply
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.checker import Oracle


NO_ANSWERS = [
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
]
"""Answers that acknowledge nothing."""

FOREIGN_ANSWERS = [
    Reply(status=200, document={"status": "ok"}),
    Reply(status=200, document={"schema": 1, "num_rows": 0}),
    Reply(status=200, document=[]),
    Reply(status=410, body=b"<html>gone</html>"),
    Reply(status=410, document={"message": "Gone"}),
    Reply(status=400, body=b"<html>The plain HTTP request was sent to HTTPS port</html>"),
    Reply(status=413, body=b"<html>Request Entity Too Large</html>"),
    Reply(status=422, document={"detail": [{"type": "missing"}]}),
]
"""Possible answers of a load balancer, a gateway or a sign-in page."""


@pytest.mark.parametrize(
    ("prefix", "reply"),
    [
        *itertools.product(["/v1/spans"], NO_ANSWERS),
        *itertools.product(["/v1/rows/", "/v1/spans", "/v1/resume"], FOREIGN_ANSWERS),
    ],
)
def test_rows_are_given_up_only_if_the_collector_itself_says_so(
    prefix: str, reply: Reply, oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    with FakeCollector() as collector:
        collector.misbehave = lambda path, _: reply if path.startswith(prefix) else None
        builder = SpoolBuilder(spool, run_id="run")
        builder.group(5, kind="dp", name="dp", members=[0, 1])
        write_spans(builder, oracle, 20)
        builder.end()
        rig = Rig(spool, collector.url)
        for _ in range(4):
            rig.turn()
        assert list(spool.glob("run/*/seg-*"))
        assert prefix != "/v1/spans" or not any_settled(rig)
        assert not any("deleted" in line for line in rig.lines)
        assert not (rig.state / "dead").exists()
        assert rig.lines

        collector.misbehave = lambda _path, _body: None
        rig.turn_until(lambda: not list(spool.glob("run/*/seg-*")))

        assert_clean(tmp_path, collector.stored)
        assert {"runs", "ranks", "groups", "manifests"} <= collector.stored.described.keys()


def test_a_proxy_that_limits_the_length_of_bodies_gets_shorter_ones(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    limit, lengths = 10_000, []
    too_large = Reply(status=413, body=b"<html>Request Entity Too Large</html>")
    for rank in range(60):
        write_ended(spool, oracle, 20, rank=rank)

    def reject_long(path: str, body: bytes) -> Reply | None:
        if path == "/v1/spans":
            lengths.append(len(body))
        return too_large if len(body) > limit else None

    with FakeCollector() as collector:
        collector.misbehave = reject_long
        rig = Rig(spool, collector.url)
        rig.turn_until(lambda: not list(spool.glob("run/*/seg-*")))

        assert max(lengths) > limit
        assert_clean(tmp_path, collector.stored)
        assert not (rig.state / "dead").exists()


def test_no_request_is_sent_within_the_pause_of_retry_after(oracle: Oracle, spool: Path) -> None:
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


def test_a_replaced_token_is_used_at_once_and_nothing_is_lost(
    oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    # GIVEN a token that has expired
    file = tmp_path / "token"
    file.write_text("expired\n")
    file.chmod(0o600)
    with FakeCollector() as collector:
        write_ended(spool, oracle, 20)
        rig = Rig(spool, collector.url, environment={"RANKSCOPE_TOKEN_FILE": str(file)})
        begun_s = rig.pauses.now_s
        rig.turn()
        while rig.pauses.now_s - begun_s < 59:
            rig.turn()
        # THEN the agent tries once a minute
        assert len(collector.requests) == 1

        # WHEN it is replaced, the agent does not wait for the end of the minute
        file.write_text(TOKEN)
        before_s = rig.pauses.now_s
        rig.turn_until(lambda: len(collector.stored.rows) >= 20)

        assert rig.pauses.now_s - before_s < 10
        assert_clean(tmp_path, collector.stored)
        assert [line.partition(":")[0] for line in rig.lines] == ["the collector"] * 2
        assert TOKEN not in "".join(rig.lines)


def test_a_token_replaced_during_a_request_is_used_at_once(
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

        assert rig.pauses.now_s - before_s < 10  # not the end of the minute


@pytest.mark.parametrize("content", ["", "two words", "\x00\xff", "x" * 10_000])
def test_the_agent_waits_for_a_valid_token_file(
    content: str, oracle: Oracle, spool: Path, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(0o600)
    with FakeCollector() as collector:
        write_ended(spool, oracle, 5)
        rig = Rig(spool, collector.url, environment={"RANKSCOPE_TOKEN_FILE": str(file)})
        rig.turn()
        assert collector.requests == []
        file.write_text(TOKEN)
        before_s = rig.pauses.now_s
        rig.turn_until(lambda: len(collector.stored.rows) >= 5)

        assert rig.pauses.now_s - before_s < 10  # not the end of the minute
        assert_clean(tmp_path, collector.stored)


def test_each_new_reason_of_a_trouble_is_logged_once(oracle: Oracle, spool: Path) -> None:
    # GIVEN a collector that fails, then rejects the token, and fails again
    with FakeCollector() as collector:
        write_spans(SpoolBuilder(spool, run_id="run"), oracle, 5)
        rig = Rig(spool, collector.url)
        statuses = [502, 502, 401, 502]
        collector.misbehave = lambda _path, _body: (
            Reply(status=statuses.pop(0)) if statuses else None
        )
        rig.turn_until(lambda: len(collector.stored.rows) >= 4)

        # THEN each reason is logged once, and the end
        logged = [line.partition(": ")[2].partition(";")[0] for line in rig.lines]
        assert logged[0] == "the collector answers 502"
        assert logged[1].startswith("the collector does not know the token")
        assert logged[2].startswith("works again after")
        assert len(logged) == 3


def test_sixty_four_agents_do_not_retry_together() -> None:
    # GIVEN 64 agents that lose their collector at once and retry for two minutes
    chooser = random.Random(5)
    tries = [0] * 121
    for _ in range(64):
        backoff, now_s = Backoff(uniform=chooser.uniform), 0.0
        while now_s <= 120:
            tries[int(now_s)] += 1
            now_s += backoff.failed()

    # THEN after the first seconds at most half of them try in one second, and each of them
    # tries once in five seconds
    assert max(tries[20:]) <= 32
    assert sum(tries[60:]) / 64 <= 14


def test_agents_with_the_same_retry_after_return_at_different_times() -> None:
    chooser = random.Random(5)
    pauses_s = [Backoff(uniform=chooser.uniform).failed(20.0) for _ in range(64)]

    assert min(pauses_s) >= 20
    assert max(pauses_s) - min(pauses_s) >= 4
    assert Backoff(uniform=lambda low, _: low).failed(1e9) == LONGEST_RETRY_AFTER_S

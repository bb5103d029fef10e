"""Alignment of two hosts whose wall clocks differ by ten seconds (fault D2)."""

from __future__ import annotations

import json
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from rankscope.collector.clock.sync import ProbeConfig
from tests.faults.many_agents import spool_of, start_agent
from tests.support.collector.fake_collector import TOKEN, FakeCollector
from tests.support.collector.kept_cuts import decode_cuts
from tests.support.collector.spool_builder import SpoolBuilder, this_host
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.support.collector.fake_collector import Reply

NS_PER_S, MS = 10**9, 10**6
AHEAD_S = (5, -5)


def test_spans_of_hosts_with_different_clocks_are_aligned_within_a_millisecond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN two hosts with a span at the same moment, one clock 5 s ahead and one 5 s behind
    monkeypatch.setenv("RANKSCOPE_TOKEN", TOKEN)
    at_ns, unix_ns = time.monotonic_ns(), time.time_ns()
    for rank, ahead_s in enumerate(AHEAD_S):
        own = this_host()
        ahead_ns = unix_ns + ahead_s * NS_PER_S + (own["anchor_monotonic_ns"] - at_ns)
        spool = spool_of(tmp_path, rank)
        builder = SpoolBuilder(spool, run_id="run", rank=rank, anchor_unix_ns=ahead_ns, **own)
        builder.span(start_ns=at_ns, duration_ns=7 * MS)
        builder.end()
    spans: dict[int, dict[str, Any]] = {}
    errors_ns: list[int] = []

    def take(path: str, body: bytes) -> Reply | None:
        if path == "/v1/spans":
            spans.update(
                {r["rank"]: r for c in decode_cuts(body) for r in c.rows.spans.to_pylist()}
            )
        if path == "/v1/rows/clock":
            errors_ns.extend(row["clock_error_ns"] for row in json.loads(body)["rows"])
        return None

    # WHEN an agent on each of them sends it
    stopping = threading.Event()
    with FakeCollector() as collector, ExitStack() as stack:
        collector.misbehave = take
        agents = [
            start_agent(collector.url, tmp_path, rank, stack=stack, probing=ProbeConfig())
            for rank in range(len(AHEAD_S))
        ]
        threads = [threading.Thread(target=agent.run, args=(stopping,)) for agent in agents]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: min(len(spans), len(errors_ns)) >= len(AHEAD_S))
        finally:
            stopping.set()
            for thread in threads:
                thread.join()
        reference_ns = collector.clock.now_ns() - time.monotonic_ns() + at_ns

    # THEN both are at that moment of the collector's clock, with their durations
    assert abs(spans[0]["start_ns"] - spans[1]["start_ns"]) < MS
    assert abs(spans[0]["start_ns"] - reference_ns) < MS
    assert [spans[rank]["duration_ns"] for rank in (0, 1)] == [7 * MS, 7 * MS]
    # AND the error bound is stored; a busy machine answers probes late
    assert len(errors_ns) >= len(AHEAD_S)
    assert all(0 < error_ns < 100 * MS for error_ns in errors_ns)

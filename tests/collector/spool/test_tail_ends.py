from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.causes.crash import find_crashes
from rankscope.collector.read.runs import read_events
from rankscope.collector.read.spans import read_spans
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.writer import StoreWriter
from rankscope.sources.store_source import StoreSource
from tests.support.analysis.exit_builders import NO_STEPS
from tests.support.collector.spool_builder import SpoolBuilder, this_host
from tests.support.collector.stored import names_of

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.store.store import Store
    from tests.collector.conftest import FakeClock


@pytest.mark.slow
def test_an_exception_becomes_an_event_and_the_state_of_the_run(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, **this_host() | {"pid": 2**22 + 1})
    spool.span("last")
    spool.fail("ValueError", "bad shape", at_ns=77)

    SpoolTail(tmp_path, StoreWriter(store)).poll()

    (event,) = read_events(store, run_id)
    assert (event["kind"], event["text"], event["at_ns"]) == ("exit", "ValueError: bad shape", 77)
    assert json.loads(event["data"])["exception"]["traceback"] == "Traceback ..."
    assert names_of(store, run_id) == ["last"]
    summary = {run.run_id: run for run in StoreSource(store).runs()}[run_id]
    assert (summary.state, summary.num_spans) == ("failed", 1)


def test_a_process_that_recorded_an_exception_and_still_runs_has_not_ended(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id, **this_host())
    spool.span("a")
    spool.fail("ValueError", "x")
    tail = SpoolTail(tmp_path, StoreWriter(store), monotonic_ns=clock)
    tail.poll()
    spool.span("written by an exit handler", start_ns=5)
    clock.advance_s(1)

    assert tail.poll().num_running == 1
    assert names_of(store, run_id) == ["a"]


KILLED = """
import sys
from pathlib import Path
from tests.support.collector.spool_builder import SpoolBuilder, this_host
spool = SpoolBuilder(Path(sys.argv[1]), run_id=sys.argv[2], capacity=4096, **this_host())
for step in range(1000):
    spool.span("forward", start_ns=10 * step, step=step)
spool.open_span(0, "all_reduce", start_ns=10_000, step=1000)
spool.span("half written", commit=False)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.multiproc
@pytest.mark.parametrize("is_watched", [True, False])
def test_all_committed_rows_of_a_killed_process_are_stored(
    store: Store, run_id: str, tmp_path: Path, *, is_watched: bool
) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), run_id]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        tail = SpoolTail(tmp_path, StoreWriter(store))
        if is_watched:
            assert tail.poll().num_running == 1
        process.send_signal(signal.SIGKILL)
        process.wait()

    progress = tail.poll()

    assert progress.num_running == 0
    spans = read_spans(store, run_id)
    assert spans["step"].to_pylist() == list(range(1000))
    info = StoreSource(store).run_info(run_id)
    assert info.account.dropped == {"torn": 1}
    assert info.epochs[0].ranks[0].exit_state == "lost"
    (event,) = read_events(store, run_id)
    assert (event["kind"], event["text"]) == ("lost", "lost at step 1000, open span = all_reduce")
    # The moment of its end; or else it lived at least until it began what it was in.
    began_ns = spans["start_ns"][0].as_py() + 10_000
    assert event["at_ns"] > began_ns if is_watched else event["at_ns"] == began_ns
    tail.close()


def test_a_process_that_was_not_watched_ended_after_its_last_counters(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    # GIVEN a process that is gone, whose tracer wrote its counters long after the last record
    gone = this_host() | {"pid": 2**22 + 1}
    spool = SpoolBuilder(tmp_path, run_id=run_id, **gone)
    spool.span("forward", start_ns=10, duration_ns=10)
    spool.publish(produced=1, written=1, at_ns=20_000_000_020)

    SpoolTail(tmp_path, StoreWriter(store)).poll()

    (event,) = read_events(store, run_id)
    data = json.loads(event["data"])
    assert (event["kind"], event["at_ns"] - data["recorded_ns"]) == ("lost", 20_000_000_000)
    assert data["at_error_ns"] == 1_000_000_000
    (ended,) = StoreSource(store).context(run_id).exits
    assert (ended.at_ns, ended.recorded_ns) == (event["at_ns"], data["recorded_ns"])
    assert ended.at_error_ns == 1_000_000_000


TERMINATED = """
import signal, sys
from rankscope import tracer
before = signal.getsignal(signal.SIGTERM)
tracer.install(count_steps=False)
assert signal.getsignal(signal.SIGTERM) is before is signal.SIG_DFL
tracer.begin_steps()
for _ in range(3):
    with tracer.span("work"):
        pass
    tracer.step()
with tracer.span("exchange", microbatch=0):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.multiproc
def test_a_rank_terminated_by_its_launcher_is_lost_at_the_next_poll(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    environ = {**os.environ, "RANKSCOPE_TRACE": str(tmp_path), "RANKSCOPE_RUN": run_id}
    command = [sys.executable, "-c", TERMINATED]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, env=environ
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        tail = SpoolTail(tmp_path, StoreWriter(store))
        assert tail.poll().num_running == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM

    assert tail.poll().num_running == 0

    source = StoreSource(store)
    info = source.run_info(run_id)
    assert info.epochs[0].ranks[0].exit_state == "lost"
    assert names_of(store, run_id) == ["work", "work", "work"]
    (event,) = [event for event in read_events(store, run_id) if event["kind"] == "lost"]
    assert event["text"] == "lost at step 3, open span = exchange"
    crashes = find_crashes(info, source.context(run_id), NO_STEPS)
    # From Linux 6.15 on the signal is known: all ranks were asked to end.
    is_known = "exit_code" in event["data"]
    assert [crash.ranks for crash in crashes] == ([] if is_known else [(0,)])


def test_an_exit_record_that_is_not_json_counts_as_failed(
    store: Store, run_id: str, tmp_path: Path, clock: FakeClock
) -> None:
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.span()
    (spool.folder / "exit.json").write_text("{")
    tail = SpoolTail(tmp_path, StoreWriter(store), monotonic_ns=clock)

    (problem,) = tail.poll().problems
    clock.advance_s(3)  # the grace time: the liveness of a process on another host is unknown
    progress = tail.poll()

    assert "exit.json" in problem
    assert progress.num_running == 0
    assert StoreSource(store).run_info(run_id).epochs[0].ranks[0].exit_state == "failed"

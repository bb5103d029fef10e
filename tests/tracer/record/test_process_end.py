"""Ends of a traced process: normal, by an exception, killed, or as a fork."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from rankscope.tracer.spool import SEGMENT_GLOB, sealed_rows
from tests.support.tracer.reading import dropped, only_folder, read_spans
from tests.support.tracer.recording import run_script

if TYPE_CHECKING:
    from pathlib import Path


def exit_record(spool: Path) -> dict[str, object]:
    document: dict[str, object] = json.loads((only_folder(spool) / "exit.json").read_text())
    return document


def test_a_process_that_ends_writes_an_exit_record_and_seals_its_segments(tmp_path: Path) -> None:
    done = run_script(
        """
        import gc
        from rankscope import tracer
        gc.disable()
        tracer.install()
        with tracer.span("work"):
            pass
        """,
        tmp_path,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert exit_record(tmp_path)["state"] == "ended"
    (segment,) = only_folder(tmp_path).glob(SEGMENT_GLOB)
    assert sealed_rows(segment.read_bytes()) == 1


def test_the_exit_record_holds_the_exception_that_ended_the_process(tmp_path: Path) -> None:
    done = run_script(
        """
        import sys
        from rankscope import tracer
        sys.excepthook = lambda *about: print("the job's own hook")
        tracer.install()
        raise ValueError("no such luck")
        """,
        tmp_path,
    )

    assert (done.returncode, done.stdout) == (1, "the job's own hook\n")
    record = exit_record(tmp_path)
    assert record["state"] == "failed"
    exception = record["exception"]
    assert isinstance(exception, dict)
    assert (exception["type"], exception["message"]) == ("ValueError", "no such luck")
    assert 'raise ValueError("no such luck")' not in done.stderr
    assert exception["traceback"].startswith("Traceback (most recent call last):")
    assert exception["traceback"].endswith("ValueError: no such luck\n")


def test_an_exit_record_is_bounded_for_any_exception(tmp_path: Path) -> None:
    done = run_script(
        """
        from rankscope import tracer
        tracer.install()

        class Hostile(Exception):
            def __str__(self):
                raise RuntimeError("do not ask")

        def deeper(left):
            if left:
                deeper(left - 1)
            raise Hostile("x" * 10_000_000)

        deeper(900)
        """,
        tmp_path,
    )

    assert done.returncode == 1
    assert exit_record(tmp_path)["exception"]["type"] == "__main__.Hostile"  # type: ignore[index]
    assert (only_folder(tmp_path) / "exit.json").stat().st_size < 150_000


def test_a_recorded_exception_remains_if_the_process_then_ends_normally(tmp_path: Path) -> None:
    run_script(
        """
        from rankscope import tracer
        tracer.install()
        try:
            1 / 0
        except ZeroDivisionError as problem:
            tracer.record_exception(problem)
        """,
        tmp_path,
    )

    assert exit_record(tmp_path)["state"] == "failed"


def test_sys_exit_is_not_a_failure(tmp_path: Path) -> None:
    done = run_script("import sys, tracer; tracer.install(); sys.exit(3)", tmp_path)

    assert done.returncode == 3
    assert exit_record(tmp_path)["state"] == "ended"


@pytest.mark.slow
def test_forked_children_write_nothing_and_the_parent_loses_nothing(tmp_path: Path) -> None:
    # In a separate process: a fork of this one would copy all its page tables.
    done = run_script(
        """
        import os, pathlib, sys, threading, time
        from tests.support.tracer.recording import recorder_in
        from rankscope.tracer.record.current import current_tracer, set_current, span

        folder = pathlib.Path(os.environ["RANKSCOPE_TRACE"])
        recorder = recorder_in(folder, segment_bytes=1 << 22, spool_bytes=1 << 25)
        set_current(recorder)
        stop, recorded = threading.Event(), 0

        def spam():
            global recorded
            while not stop.is_set():
                with span("parent"):
                    recorded += 1

        thread = threading.Thread(target=spam, daemon=True)
        thread.start()
        with span("around the forks"):
            for _ in range(200):
                pid = os.fork()
                if pid == 0:
                    with span("child"), recorder.span("child"):
                        os._exit(0 if not current_tracer().enabled else 1)
                begun_s = time.monotonic()
                _, status = os.waitpid(pid, 0)
                assert status == 0
                assert time.monotonic() - begun_s < 60
        stop.set()
        thread.join()
        recorder.shutdown()
        print(recorded)
        """,
        tmp_path,
    )

    assert done.returncode == 0, done.stderr
    names = [row.name for row in read_spans(tmp_path)]
    assert "child" not in names
    assert names.count("around the forks") == 1
    recorded = int(done.stdout)
    assert recorded > 200
    assert names.count("parent") + sum(dropped(tmp_path).values()) == recorded


def test_no_signal_handler_is_changed(tmp_path: Path) -> None:
    done = run_script(
        """
        import signal
        from rankscope import tracer
        before = [signal.getsignal(number) for number in signal.valid_signals()]
        tracer.install()
        assert [signal.getsignal(number) for number in signal.valid_signals()] == before
        """,
        tmp_path,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

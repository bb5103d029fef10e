"""What may befall a traced process, and what must come of it: rows A of the fault matrix."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import struct
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracer
from tests.tracer.reading import dropped, process_folders, read_rows, read_spans
from tests.tracer.recording import ROOT, recorder_in, run_script, wait_until
from tracer.current import set_current
from tracer.noop import NOOP_TRACER
from tracer.spool import DropReason

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def only_folder(spool: Path) -> Path:
    (folder,) = process_folders(spool).values()
    return folder


def num_lost(folder: Path) -> int:
    counts = dropped(folder)
    return sum(num for reason, num in counts.items() if reason != DropReason.BAD_ARGUMENT)


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    """A folder into which `tracer.span` of this process records."""
    recorder = recorder_in(tmp_path, segment_bytes=1 << 20)
    set_current(recorder)
    yield tmp_path
    set_current(NOOP_TRACER)
    recorder.shutdown()


# -- A1, A2: the process dies ---------------------------------------------------


def test_what_was_recorded_before_a_kill_is_there_to_the_last_record(tmp_path: Path) -> None:
    script = """
        import mmap, sys
        import tracer
        tracer.install()
        with open(sys.argv[1], "r+b") as file:
            published = mmap.mmap(file.fileno(), 8)
        for number in range(1, 10**9):
            with tracer.span("x"):
                pass
            published[:] = number.to_bytes(8, "little")
        """
    counter = tmp_path / "published"
    counter.write_bytes(bytes(8))

    def num_published() -> int:
        return int(struct.unpack("<Q", counter.read_bytes())[0])

    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(counter)],
        cwd=ROOT,
        env={**os.environ, "RANKSCOPE_TRACE": str(tmp_path / "spool"), "RANKSCOPE_RUN": "run"},
    )
    wait_until(lambda: num_published() > 1000)
    child.kill()
    child.wait()

    folder = only_folder(tmp_path / "spool")
    assert len(read_spans(folder)) + num_lost(folder) >= num_published() - 1


def test_a_crash_in_c_keeps_what_was_recorded(tmp_path: Path) -> None:
    done = run_script(
        """
        import ctypes
        import tracer
        tracer.install()
        for _ in range(100):
            with tracer.span("x"):
                pass
        ctypes.string_at(0)
        """,
        tmp_path,
    )

    assert done.returncode == -signal.SIGSEGV
    assert len(read_spans(only_folder(tmp_path))) == 100


# -- A4, A13: exceptions, and handlers within the tracer's lines ------------------


def test_an_exit_stack_and_a_context_manager_by_hand_record_as_with_does(installed: Path) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracer.span("stacked"))

    def fail_within() -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(tracer.span("stacked and failed"))
            raise KeyError

    with pytest.raises(KeyError):
        fail_within()
    by_hand = tracer.span("by hand")
    by_hand.__enter__()
    by_hand.__exit__(None, None, None)

    flags = {row.name: int(row.flags) for row in read_spans(installed)}
    assert flags == {"stacked": 16, "stacked and failed": 16 + 64, "by hand": 16}


def test_an_exception_passes_a_span_that_was_entered_before_unchanged(installed: Path) -> None:
    def fail(times: int) -> None:
        for number in range(times):
            with tracer.span("x"):
                if number == times - 1:
                    raise raised

    raised = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        fail(3)

    assert caught.value is raised
    assert len(caught.traceback) == 2  # this test and `fail`: no frame of the tracer
    assert [int(row.flags) for row in read_spans(installed)] == [16, 16, 16 + 64]


def test_a_name_within_itself_and_tasks_side_by_side_keep_their_own_times(
    installed: Path,
) -> None:
    def descend(levels: int) -> None:
        with tracer.span("deeper"):
            if levels:
                descend(levels - 1)

    descend(0)  # so that the span is one that was made before
    descend(2)
    first = tracer.span("task")
    first.__enter__()
    second = tracer.span("task")
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)

    rows = read_spans(installed)
    assert [row.depth for row in rows if row.name == "deeper"] == [0, 0, 1, 2]
    one, two = (row for row in rows if row.name == "task")
    assert one.start_ns <= two.start_ns <= one.end_ns <= two.end_ns


def test_names_nested_deeper_than_a_byte_counts_are_all_kept(installed: Path) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(300):
            stack.enter_context(tracer.span(f"level {number}"))

    assert [row.depth for row in read_spans(installed)] == list(range(300))


def test_a_handler_that_raises_costs_at_most_the_span_in_hand(installed: Path) -> None:
    class Deadline(Exception):  # noqa: N818 - the job's own
        pass

    def on_alarm(number: int, frame: object) -> None:
        raise Deadline

    entered = 0
    previous = signal.signal(signal.SIGALRM, on_alarm)
    try:
        for _ in range(30):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.001)
                while True:
                    with tracer.span("x"):
                        entered += 1
            except Deadline:
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)

    # With each of the 30 the span in hand may go, where it was raised at the first
    # instruction of `__exit__`, or come uncounted, where it was raised before the body.
    assert abs(len(read_spans(installed)) + num_lost(installed) - entered) <= 30


def test_handlers_and_finalizers_that_use_the_name_they_interrupt_lose_nothing(
    tmp_path: Path,
) -> None:
    recorder = recorder_in(tmp_path, segment_bytes=1 << 22, spool_bytes=1 << 24)
    set_current(recorder)
    entered = 0

    def record() -> None:
        nonlocal entered
        entered += 1
        with tracer.span("x"):
            pass

    class Cyclic:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            record()

    threshold = gc.get_threshold()
    gc.set_threshold(1)
    previous = signal.signal(signal.SIGALRM, lambda number, frame: record())
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for _ in range(3000):
            entered += 1
            with tracer.span("x"):
                Cyclic()
            record()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        gc.set_threshold(*threshold)
        gc.collect()
        set_current(NOOP_TRACER)
        recorder.shutdown()

    rows = read_spans(tmp_path)
    assert dropped(tmp_path) == {}
    assert len(rows) == entered > 9000
    assert all(row.duration_ns >= 0 for row in rows)
    assert all(row.duration_ns < 10**10 for row in rows)


def test_more_threads_than_lanes_share_the_last_one_and_lose_nothing(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path, segment_bytes=4096 + 64 * 128, spool_bytes=1 << 22)
    everyone = threading.Barrier(70)

    def work() -> None:
        with recorder.span("x"):
            everyone.wait()
        for _ in range(3):
            with recorder.span("x"):
                pass

    threads = [threading.Thread(target=work) for _ in range(70)]
    for thread in threads:
        recorder._source.prepare()  # spares come one by one, and each thread may need one
        thread.start()
    for thread in threads:
        thread.join()
    recorder.shutdown()

    rows = read_spans(tmp_path)
    assert dropped(tmp_path) == {}
    assert len(rows) == 70 * 4
    assert len({row.track for row in rows}) == 63  # of 64 lanes one is that of communication


# -- A5: hostile arguments ---------------------------------------------------------


class Hostile(str):
    """A string whose every method raises."""

    __slots__ = ()

    def _raise(self, *about: object) -> Any:  # noqa: ANN401
        raise RuntimeError("do not ask")

    __str__ = __repr__ = __hash__ = __eq__ = __len__ = encode = _raise  # type: ignore[assignment]


RECURSIVE: dict[str, object] = {}
RECURSIVE["me"] = RECURSIVE


@given(
    name=st.one_of(
        st.text(),
        st.none(),
        st.binary(),
        st.integers(),
        st.lists(st.integers()),
        st.builds(lambda: Hostile("x")),
        st.sampled_from([RECURSIVE, "y" * 10_000_000, "\ud800", "a\0b"]),
    ),
    place=st.one_of(st.none(), st.integers(), st.floats(), st.text(), st.just(RECURSIVE)),
    kind=st.one_of(st.none(), st.sampled_from(tracer.SpanKind), st.text(), st.just(RECURSIVE)),
)
@settings(max_examples=60, deadline=None)
def test_no_argument_makes_the_module_s_function_raise(
    module_recorder: Path,
    name: Any,  # noqa: ANN401
    place: Any,  # noqa: ANN401
    kind: Any,  # noqa: ANN401
) -> None:
    for _ in range(2):  # the second time it may be a span that was made before
        with tracer.span(name):
            pass
        with tracer.span(name, kind=kind, microbatch=place, chunk=place):
            pass


@pytest.fixture(scope="module")
def module_recorder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("hostile")
    recorder = recorder_in(folder)
    set_current(recorder)
    yield folder
    set_current(NOOP_TRACER)
    recorder.shutdown()
    assert DropReason.INTERNAL_ERROR not in dropped(folder)


# -- A7: workers of a data loader -----------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "num_workers"),
    [("fork", 0), ("fork", 2), ("fork", 4), ("spawn", 2), ("forkserver", 2)],
)
def test_loader_workers_leave_the_parents_records_alone(
    tmp_path: Path, method: str, num_workers: int
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import torch
            import tracer

            class Numbers(torch.utils.data.Dataset):
                def __len__(self):
                    return 16

                def __getitem__(self, index):
                    with tracer.span("item"):
                        return torch.tensor(index)

            if __name__ == "__main__":
                tracer.install()
                loader = torch.utils.data.DataLoader(
                    Numbers(),
                    batch_size=4,
                    num_workers={num_workers},
                    multiprocessing_context={method!r} if {num_workers} else None,
                    persistent_workers={num_workers} > 0,
                )
                tracer.begin_steps()
                for _ in range(2):
                    for batch in loader:
                        with tracer.span("train"):
                            print(batch.tolist())
                    tracer.step()
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RANKSCOPE_TRACE": str(tmp_path / "spool"),
            "RANKSCOPE_RUN": "run",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "rankscope" not in done.stderr
    assert sum(map(len, map(eval, done.stdout.splitlines()))) == 32
    folder = only_folder(tmp_path / "spool")
    names = [row.name for row in read_spans(folder)]
    assert names.count("train") == 8
    assert names.count("item") == (0 if num_workers else 32)
    assert num_lost(folder) == 0


# -- A9: the disk -----------------------------------------------------------------------

SPANS = """
    import resource, signal, sys
    import tracer
    {before}
    tracer.install()
    {after}
    for _ in range(20_000):
        with tracer.span("x"):
            pass
    """


UNTIL_FULL = """
    from tests.tracer.recording import wait_until
    wait_until(lambda: tracer.current_tracer()._source._on_full is None)
    """
"""The process may be over before its thread has looked for one segment more."""


def produced_is_stored_and_dropped(folder: Path, num_spans: int) -> bool:
    return len(read_spans(folder)) + num_lost(folder) == num_spans


def test_a_file_system_without_room_costs_records_that_are_counted(tmp_path: Path) -> None:
    # A file may not grow beyond 1,060,864 bytes: room for the names, not for a segment of 2 MiB.
    done = run_script(
        SPANS.format(
            before="resource.setrlimit(resource.RLIMIT_FSIZE, (1_060_864, 1_060_864))", after=""
        ),
        tmp_path,
        RANKSCOPE_SEGMENT_BYTES=str(2 << 20),
    )

    assert done.returncode == 0
    assert (
        done.stderr == "rankscope: rank 0 drops spans, and counts them: [Errno 27] File too large\n"
    )
    folder = only_folder(tmp_path)
    assert dropped(folder) == {DropReason.SPOOL_FULL: 20_000}
    assert "File too large" in (folder / "events.jsonl").read_text()


def test_a_disk_that_fills_up_kills_nobody(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare, for a disk of 4 MiB")
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(SPANS.format(before="", after="") + UNTIL_FULL))
    disk = tmp_path / "disk"
    disk.mkdir()
    run, keep = f"{sys.executable} {script}", f"cp -r {disk} {tmp_path / 'kept'}"
    done = subprocess.run(
        [
            *("unshare", "-rm", "sh", "-c"),
            f"mount -t tmpfs -o size=4m tmpfs {disk} || exit 77; {run} || exit $?; {keep}",
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RANKSCOPE_TRACE": str(disk),
            "RANKSCOPE_RUN": "run",
            "RANKSCOPE_SEGMENT_BYTES": str(1 << 20),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("may not mount a disk here")

    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stderr
    folder = only_folder(tmp_path / "kept")
    stored = len(read_spans(folder))
    assert 8_000 < stored < 4 * 2**20 / 128
    assert produced_is_stored_and_dropped(folder, 20_000)


def test_a_folder_that_goes_away_costs_records_only(tmp_path: Path) -> None:
    done = run_script(
        SPANS.format(
            before="import shutil, os",
            after="shutil.rmtree(os.environ['RANKSCOPE_TRACE'] + '/run')",
        ),
        tmp_path,
        RANKSCOPE_SEGMENT_BYTES=str(1 << 18),
    )

    assert done.returncode == 0
    # The process may end before its background thread has looked for a segment in vain.
    assert done.stderr.count("No such file or directory") <= 1
    assert list(tmp_path.iterdir()) == []


def test_nobody_may_cut_a_mapped_file_short(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("*.rsp")}
    recorder.shutdown()

    assert set(modes) >= {"process.rsp", "seg-000000.rsp"}
    assert set(modes.values()) == {0o440}


# -- A10: memory ---------------------------------------------------------------------------


def test_the_jobs_own_memory_error_passes_and_recording_goes_on(tmp_path: Path) -> None:
    done = run_script(
        """
        import resource
        import tracer
        tracer.install()
        used = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), used + (16 << 20)))
        hoard, caught = [], 0
        for size in [1 << 22] * 20 + [1 << 16] * 300 + [1 << 10] * 20_000:
            try:
                with tracer.span("allocate"):
                    hoard.append(bytearray(size))
            except MemoryError:
                caught += 1
        num_spans = 20 + 300 + 20_000
        hoard.clear()
        print(caught, num_spans)
        """,
        tmp_path,
        RANKSCOPE_SEGMENT_BYTES=str(1 << 18),
    )

    assert done.returncode == 0, done.stderr
    caught, num_spans = map(int, done.stdout.split())
    assert caught > 0
    folder = only_folder(tmp_path)
    assert produced_is_stored_and_dropped(folder, num_spans)
    assert DropReason.INTERNAL_ERROR not in dropped(folder)


# -- A12: the end -----------------------------------------------------------------------------


def test_leaving_within_a_span_beside_a_busy_thread_ends_in_time(tmp_path: Path) -> None:
    done = run_script(
        """
        import threading
        import tracer
        tracer.install()

        def work():
            while True:
                with tracer.span("beside"):
                    pass

        threading.Thread(target=work, daemon=True).start()
        with tracer.span("around"):
            raise SystemExit(3)
        """,
        tmp_path,
    )

    assert done.returncode == 3
    assert "around" in {row.name for row in read_spans(only_folder(tmp_path))}


# -- A16, A17: turned off, and without the libraries --------------------------------------------


def test_the_kill_switch_leaves_no_folder_and_one_shared_span(tmp_path: Path) -> None:
    done = run_script(
        """
        import tracer
        assert not tracer.install().enabled
        assert tracer.span("x") is tracer.span("y") is tracer.span("z", microbatch=3)
        """,
        tmp_path,
        RANKSCOPE_DISABLE="1",
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_without_torch_numpy_and_arrow_spans_and_steps_are_recorded(tmp_path: Path) -> None:
    done = run_script(
        """
        import sys
        for name in ("torch", "numpy", "pyarrow"):
            sys.modules[name] = None
        import tracer
        assert tracer.install().enabled
        tracer.begin_steps()
        with tracer.span("x"):
            pass
        tracer.step(tokens=4, loss=0.5)
        """,
        tmp_path,
    )

    assert (done.returncode, done.stderr) == (0, "")
    folder = only_folder(tmp_path)
    assert [row.name for row in read_spans(folder)] == ["x"]
    assert len(read_rows(folder)) == 2


# -- A18: restarts -----------------------------------------------------------------------------


def test_a_restarted_rank_writes_beside_its_former_life_not_over_it(tmp_path: Path) -> None:
    script = """
        import os, signal, sys
        import tracer
        tracer.install()
        with tracer.span(os.environ["TORCHELASTIC_RESTART_COUNT"]):
            pass
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        """
    for count, world_size in (("0", "4"), ("1", "2")):
        run_script(
            script,
            tmp_path,
            TORCHELASTIC_RESTART_COUNT=count,
            RANK="1",
            WORLD_SIZE=world_size,
            TORCHELASTIC_RUN_ID="job",
        )

    first, second = sorted((tmp_path / "run").iterdir())
    assert (first.name[:9], second.name[:9]) == ("e0-r00001", "e1-r00001")
    assert not (first / "exit.json").exists()
    assert (second / "exit.json").exists()
    assert [row.name for row in read_spans(first)] == ["0"]
    assert [row.name for row in read_spans(second)] == ["1"]


# -- promise 1: our own errors ------------------------------------------------------------------


def test_an_error_of_the_tracers_own_is_counted_and_reaches_nobody(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*about: object) -> None:
        raise RuntimeError

    # Compiled as if it were the tracer's own file: that is how an error is told to be ours.
    broken.__code__ = broken.__code__.replace(co_filename=tracer.__file__)
    tracer.begin_steps()
    monkeypatch.setattr("tracer.lane.Lane.write", broken)
    monkeypatch.setattr("tracer.lanes.Lanes.span", broken)
    tracer.step(tokens=3)
    tracer.microbatch(0)
    with tracer.span("new"), tracer.span("x", kind=tracer.SpanKind.DATA, microbatch=2):
        pass

    assert dropped(installed) == {DropReason.INTERNAL_ERROR: 4}

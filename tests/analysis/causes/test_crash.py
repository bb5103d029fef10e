from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.causes.crash import ExitClass, classify_exit, find_crashes
from rankscope.analysis.trace.context import RankExit, RunContext
from tests.support.analysis.exit_builders import (
    NO_STEPS,
    SECOND,
    context_of,
    cut_off,
    event,
    failed,
    lost,
    run_of,
    timed_out,
)
from tests.support.analysis.sample_builders import join, samples

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankscope.analysis.report.report import Finding
    from rankscope.analysis.trace.context import EventRecord, SampleTable

CUDA_OOM = (
    "torch.OutOfMemoryError",
    "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 3 has a total capacity of 79.1 GiB",
)


def crash(*ends: RankExit, events: Iterable[EventRecord] = (), **context: object) -> Finding:
    held = replace(context_of(*ends, events=events), **context)  # type: ignore[arg-type]
    (finding,) = find_crashes(run_of(), held, NO_STEPS)
    return finding


def test_the_first_failure_is_named_and_those_that_followed_are_not() -> None:
    others = (cut_off(rank, 10.5 + rank) for rank in range(8) if rank != 5)

    finding = crash(failed(5, 10.0, *CUDA_OOM), *others)

    assert (finding.cause, finding.ranks, finding.steps) == ("crash", (5,), (41, 41))
    assert finding.confidence == pytest.approx(0.95)
    assert (finding.slowdown, finding.recoverable_ratio) == (None, None)
    assert finding.evidence == (
        "rank 5 (host h1) failed first in step 41: CUDA out of memory (torch.OutOfMemoryError:"
        " CUDA out of memory. Tried to allocate 2.00 GiB.); 7 others followed,"
        " the first 500 ms later (lost connection)"
    )


def test_a_lost_connection_follows_a_failure_even_if_it_is_recorded_before_it() -> None:
    finding = crash(cut_off(0, 9.0), failed(5, 10.0, "ValueError", "bad token"))

    assert finding.ranks == (5,)
    assert "exception (ValueError: bad token)" in finding.evidence


def test_an_exception_raised_from_a_lost_connection_is_one() -> None:
    message = "[Stage 1] failed to run forward:\nargs: ...\ncaused by RuntimeError: {}"
    cut_off_in_stage = failed(0, 9.0, "RuntimeError", message.format("Connection closed by peer"))
    out_of_memory = failed(5, 10.0, "RuntimeError", message.format("CUDA out of memory.\nmore"))

    finding = crash(cut_off_in_stage, out_of_memory)

    assert finding.ranks == (5,)
    assert "CUDA out of memory (RuntimeError: CUDA out of memory.)" in finding.evidence


def test_failures_that_the_clocks_cannot_order_are_all_named() -> None:
    run = run_of(clock_error_ns=50_000_000)
    near = context_of(failed(1, 10.00, *CUDA_OOM), failed(6, 10.04, "ValueError", "x"))
    far = context_of(failed(1, 10.00, *CUDA_OOM), failed(6, 10.06, "ValueError", "x"))
    on_one_host = context_of(failed(1, 10.00, *CUDA_OOM), failed(2, 10.04, "ValueError", "x"))

    (finding,) = find_crashes(run, near, NO_STEPS)
    assert finding.ranks == (1, 6)
    assert finding.confidence == pytest.approx(0.95 * 0.8)
    assert "the clocks cannot order rank 6 against it" in finding.evidence
    assert find_crashes(run, far, NO_STEPS)[0].ranks == (1,)
    assert find_crashes(run, on_one_host, NO_STEPS)[0].ranks == (1,)
    assert find_crashes(run_of(clock_error_ns=None), far, NO_STEPS)[0].ranks == (1, 6)


def test_a_rank_without_an_exit_record_is_named_with_less_confidence() -> None:
    finding = crash(lost(3), *(cut_off(rank) for rank in (0, 1, 2)))

    assert finding.ranks == (3,)
    assert finding.confidence == pytest.approx(0.95 * 0.8)
    assert "no exit record" in finding.evidence


def test_ranks_that_were_all_asked_to_end_did_not_crash() -> None:
    # GIVEN a scheduler that ends all processes by SIGTERM, one of which is slow to notice
    run = run_of()
    num = len(run.epochs[0].ranks)
    asked = [replace(lost(rank, 10.0 + 0.1 * (rank == 2)), exit_code=-15) for rank in range(num)]

    assert find_crashes(run, context_of(*asked), NO_STEPS) == ()

    # Only one of them was, and the others lost it; or one was killed.
    evicted = context_of(asked[2], *(cut_off(rank, 10.2) for rank in range(num) if rank != 2))
    assert find_crashes(run, evicted, NO_STEPS)[0].ranks == (2,)
    killed = [replace(each, exit_code=-9) if each.rank == 2 else each for each in asked]
    killed[2] = replace(killed[2], at_ns=9 * SECOND)
    assert find_crashes(run, context_of(*killed), NO_STEPS)[0].ranks == (2,)


def test_ranks_that_ended_one_after_the_other_have_no_first_one() -> None:
    stopped = [lost(rank, 10.0 + 0.002 * rank) for rank in range(4)]

    finding = crash(*stopped)
    assert finding.ranks == (0, 1, 2, 3)
    assert (
        "ranks 1 to 3 of its host ended within 6.00 ms of it, as if the job had been stopped"
        in finding.evidence
    )

    killed = [lost(2, 9.94), *(each for each in stopped if each.rank != 2)]
    assert crash(*killed).ranks == (2,)
    assert crash(*stopped[:3], cut_off(3, 10.0)).ranks == (0,)
    assert crash(lost(1, 10.0), lost(2, 10.05)).ranks == (1, 2)


def test_ends_whose_time_is_not_exact_have_no_first_one() -> None:
    ends = [lost(0, 9.4), lost(1, 10.0), lost(2, 10.1), lost(3, 10.0)]
    about = [replace(each, at_error_ns=10**9) for each in ends]

    assert crash(*ends).ranks == (0,)
    assert crash(*about).ranks == (0, 1, 2, 3)


# Gloo: rank 0 times out and ends, which rank 1 notices; rank 3 is killed by the launcher.
TIMED_OUT_AND_NOTICED = (timed_out(0, 30.0), cut_off(1, 30.1))


@pytest.mark.parametrize(
    "exits",
    [
        pytest.param((), id="no rank failed"),
        pytest.param((timed_out(0), cut_off(1), cut_off(2)), id="all ranks followed"),
        pytest.param((lost(3), timed_out(0), timed_out(1)), id="lost after the timeouts"),
        pytest.param((*TIMED_OUT_AND_NOTICED, lost(3, 30.2)), id="lost after the first timeout"),
    ],
)
def test_ranks_that_ended_because_another_one_was_silent_did_not_crash(
    exits: tuple[RankExit, ...],
) -> None:
    assert find_crashes(run_of(), context_of(*exits), NO_STEPS) == ()


def test_a_rank_that_was_lost_before_the_first_timeout_crashed() -> None:
    assert crash(*TIMED_OUT_AND_NOTICED, lost(3, 29.0)).ranks == (3,)


def test_of_several_timeouts_the_one_in_the_handler_of_another_exception_is_first() -> None:
    origin = "ValueError: bad sample 4711 in shard 17"
    others = [timed_out(rank) for rank in (0, 2, 3)]
    exits = (replace(timed_out(1), origin=origin), *others)

    (finding,) = find_crashes(run_of(4), context_of(*exits), NO_STEPS)

    assert finding.ranks == (1,)
    assert "failed first in step 41: exception (ValueError: bad sample 4711" in finding.evidence
    # All have it: that is how a library waits.
    alike = context_of(*(replace(each, origin="queue.Empty: ") for each in exits))
    assert find_crashes(run_of(4), alike, NO_STEPS) == ()


def test_the_same_crash_in_several_epochs_is_one_finding() -> None:
    first, second = failed(5, 10.0, *CUDA_OOM), failed(5, 90.0, *CUDA_OOM, step=60)
    context = context_of(first, replace(second, epoch=1), replace(cut_off(1, 91.0), epoch=1))

    (finding,) = find_crashes(run_of(num_epochs=2), context, NO_STEPS)

    assert (finding.ranks, finding.steps) == ((5,), (60, 60))
    assert finding.evidence.endswith("; the same in 2 epochs (0, 1)")


def test_ranks_that_fail_by_themselves_with_one_message_have_no_first_one() -> None:
    # GIVEN a script that imports what is not there, on all ranks
    missing = "ModuleNotFoundError", "No module named 'cv2'"
    ends = [failed(rank, 10.0 + rank / 10, *missing, step=None) for rank in (2, 0, 1, 3)]

    (finding,) = find_crashes(run_of(4), context_of(*ends), NO_STEPS)

    assert (finding.ranks, finding.confidence) == ((0, 1, 2, 3), 0.95)
    assert finding.evidence.startswith("all 4 ranks failed by themselves: exception (ModuleNotFou")
    assert finding.evidence.endswith("; rank 0 (host h0) first, the last 300 ms later")


def test_numbers_make_no_other_message_and_the_launcher_stops_the_rest() -> None:
    # GIVEN ranks that do not fit on their devices, in two epochs, of which torchrun stops the rest
    def full(rank: int, at_s: float, text: str, epoch: int) -> RankExit:
        end = failed(rank, at_s, "OutOfMemoryError", f"CUDA out of memory. Tried {text}", step=3)
        return replace(end, epoch=epoch)

    context = context_of(
        full(1, 10.0, "2.00 GiB", 0),
        full(6, 10.2, "1.52 GiB", 0),
        failed(0, 10.5, "SignalException", "Process 7 got signal: 15"),
        full(3, 90.0, "2.01 GiB", 1),
    )

    (finding,) = find_crashes(run_of(num_epochs=2), context, NO_STEPS)

    assert finding.ranks == (1, 3, 6)
    assert finding.evidence.startswith("ranks 1 and 6 failed by themselves in step 3: CUDA out of")
    assert "1 other followed" in finding.evidence
    assert finding.evidence.endswith("; the same in 2 epochs (0, 1)")


def test_another_message_right_after_the_first_one_is_not_the_same_failure() -> None:
    first, other = failed(5, 10.0, "KeyError", "'x'"), failed(1, 10.1, "KeyError", "'y'")

    (finding,) = find_crashes(run_of(), context_of(first, other), NO_STEPS)

    assert finding.ranks == (5,)
    assert "1 other failed by themselves" in finding.evidence


@pytest.mark.parametrize(
    ("exception", "message", "expected"),
    [
        (*CUDA_OOM, ExitClass.CUDA_OOM),
        ("RuntimeError", "CUDA error: out of memory", ExitClass.CUDA_OOM),
        ("MemoryError", "", ExitClass.HOST_OOM),
        (
            "RuntimeError",
            "DataLoader worker (pid 9) is killed by signal: Killed.",
            ExitClass.HOST_OOM,
        ),
        ("torch.AcceleratorError", "CUDA error: the launch timed out", ExitClass.DEVICE),
        (
            "torch.distributed.DistBackendError",
            "NCCL error: unhandled cuda error",
            ExitClass.DEVICE,
        ),
        ("KeyError", "'maxid'", ExitClass.EXCEPTION),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", ExitClass.EXCEPTION),
        ("TimeoutError", "the data server timed out", ExitClass.EXCEPTION),
        (
            "ConnectionResetError",
            "Connection reset by peer in gloo pair.cc",
            ExitClass.CONNECTION,
        ),
        (
            "torch.distributed.DistNetworkError",
            "The client socket has timed out after 60000ms while trying to connect",
            ExitClass.TIMEOUT,
        ),
        ("torch.distributed.DistBackendError", "ncclRemoteError: peer gone", ExitClass.CONNECTION),
        (
            "RuntimeError",
            "[Rank 0]: Ranks 2 failed to pass monitoredBarrier in 4000 ms",
            ExitClass.TIMEOUT,
        ),
        (
            "RuntimeError",
            "Rank 1 successfully reached monitoredBarrier, but received errors while waiting",
            ExitClass.CONNECTION,
        ),
        ("KeyboardInterrupt", "", ExitClass.STOPPED),
        (
            "torch.distributed.elastic.multiprocessing.api.SignalException",
            "Process 7 got signal: 15",
            ExitClass.STOPPED,
        ),
    ],
)
def test_the_exception_and_its_message_give_the_reason(
    exception: str, message: str, expected: ExitClass
) -> None:
    assert classify_exit(failed(0, 1.0, exception, message)) is expected


def test_a_line_of_the_kernel_gives_the_reason_of_a_lost_rank() -> None:
    killed = event(3, "oom", "Out of memory: Killed process 4711 (python)")
    broken = event(3, "xid", "79, GPU has fallen off the bus")

    assert classify_exit(lost(3), [killed]) is ExitClass.HOST_OOM
    assert classify_exit(lost(3), [broken]) is ExitClass.DEVICE
    assert classify_exit(lost(3), [event(3, "lost", "lost at step 4")]) is ExitClass.LOST


@given(order=st.permutations(range(4)), shift_s=st.integers(0, 10**6))
def test_the_named_rank_depends_neither_on_the_order_of_exits_nor_on_the_date(
    order: list[int], shift_s: int
) -> None:
    exits: list[RankExit] = [failed(5, 10.0, *CUDA_OOM), cut_off(0, 11.0), cut_off(1, 12.0)]
    exits.append(failed(2, 13.0, "ValueError", "later"))
    moved = [replace(exits[k], at_ns=(exits[k].at_ns or 0) + shift_s * 10**9) for k in order]

    assert find_crashes(run_of(), RunContext(exits=tuple(moved)), NO_STEPS) == find_crashes(
        run_of(), context_of(*exits), NO_STEPS
    )


def line(rank: int, at_s: float, name: str, text: str, **data: object) -> EventRecord:
    """Return a line of a log of host h1, which has the ranks 4 to 7."""
    kind = "log" if "file" in data else "kernel"
    held = {"class": name, "host": "h1", "ends_process": kind == "kernel", **data}
    return replace(event(rank, kind, text, **held), at_ns=int(at_s * SECOND))


OOM_LINE = "out of memory: killed process 77 (python)"
XID_LINE = "Xid 79: GPU has fallen off the bus"


def test_a_lost_rank_that_the_kernel_killed_says_so() -> None:
    finding = crash(
        lost(5, 10.0),
        *(cut_off(rank, 10.5) for rank in range(5)),
        events=[line(5, 10.8, "oom-killer", OOM_LINE)],
    )

    assert (finding.ranks, finding.end_class) == ((5,), "host-oom")
    assert f"host out of memory ({OOM_LINE}, in the kernel's log of h1)" in finding.evidence
    assert finding.confidence == pytest.approx(0.95)


def test_a_kill_of_another_process_does_not_explain_the_end_of_a_job_that_hung() -> None:
    # GIVEN ranks that were silent for 80 s, and all killed then, as the kernel kills something
    ends = [lost(rank, 100.0, recorded_s=20.0) for rank in range(8)]
    other = line(-1, 99.0, "oom-killer", OOM_LINE)

    found = find_crashes(run_of(), context_of(*ends, events=[other]), NO_STEPS)
    of_a_rank = find_crashes(
        run_of(), context_of(*ends, events=[line(5, 99.0, "oom-killer", OOM_LINE)]), NO_STEPS
    )

    assert found == ()
    assert [(finding.ranks, finding.end_class) for finding in of_a_rank] == [((5,), "host-oom")]


@pytest.mark.parametrize(
    ("rank", "at_s", "end_class"),
    [
        (5, 10.8, "xid-79"),
        (-1, 9.0, "xid-79"),  # of the host as a whole: its device is of no known rank
        (-1, -60.0, "lost"),  # long before
        (5, 17.0, "lost"),  # long after
        (4, 10.8, "lost"),  # of another rank's device
    ],
)
def test_a_line_explains_the_end_of_its_own_process(rank: int, at_s: float, end_class: str) -> None:
    xid = line(rank, at_s, "xid", XID_LINE, code=79)

    assert crash(lost(5, 10.0), events=[xid]).end_class == end_class


def test_a_failed_device_is_the_reason_of_its_own_timeout() -> None:
    finding = crash(
        timed_out(5, 600.0),
        *(timed_out(rank, 600.0) for rank in range(5)),
        events=[line(5, 12.0, "xid", XID_LINE, code=79)],
    )

    assert (finding.ranks, finding.end_class) == ((5,), "xid-79")


@pytest.mark.parametrize(
    ("name", "text", "end_class"),
    [("xid", XID_LINE, "xid-79"), ("oom-killer", OOM_LINE, "host-oom")],
)
def test_ranks_of_a_host_with_one_line_each_in_its_log_failed_for_one_reason(
    name: str, text: str, end_class: str
) -> None:
    lines = [line(rank, 9.0 + rank / 5, name, text, code=79) for rank in (5, 7)]

    finding = crash(
        lost(7, 10.0),
        lost(5, 10.5),
        *(cut_off(rank, 11.0) for rank in (0, 1, 4)),
        events=lines,
    )

    assert (finding.ranks, finding.end_class) == ((5, 7), end_class)
    assert finding.evidence.startswith("ranks 5 and 7 failed by themselves")
    assert "rank 7 (host h1) first, the last 500 ms later; 3 others followed" in finding.evidence


def test_a_line_of_one_rank_does_not_explain_the_end_of_another() -> None:
    unknown = line(-1, 9.0, "xid", XID_LINE, code=79)  # of one device, whose rank is unknown

    finding = crash(lost(7, 10.0), lost(5, 10.5), cut_off(4, 11.0), events=[unknown])

    assert finding.ranks == (7,)


def test_an_xid_long_before_an_exception_is_not_its_reason() -> None:
    nvlink = line(5, 12.0, "xid", "Xid 74: NVLink error", code=74)

    assert crash(failed(5, 600.0, "ValueError", "x"), events=[nvlink]).end_class == "exception"


def test_a_killed_data_loader_is_the_reason_of_the_exception_of_its_rank() -> None:
    message = "DataLoader worker (pid(s) 91) exited unexpectedly"
    finding = crash(
        failed(5, 10.0, "RuntimeError", message), events=[line(5, 9.5, "oom-killer", OOM_LINE)]
    )

    assert finding.end_class == "host-oom"


def test_a_message_that_follows_from_a_kill_explains_nothing() -> None:
    cleanup = line(5, 10.2, "xid", "Xid 45: cleanup", code=45, ends_process=False)

    assert crash(lost(5, 10.0), events=[cleanup]).end_class == "lost"


def kernel_samples(kills: list[float], *, has_log: bool) -> SampleTable:
    counted = samples("oom-killed-processes", {("h1", -1): kills})
    read = samples("kernel-log-lines", {("h1", -1): [5.0] * len(kills)})
    return join(read, counted) if has_log else counted


def test_a_rank_killed_by_a_signal_names_it_and_the_kernel_log_has_no_trace() -> None:
    killed = replace(lost(5, 10.0), exit_code=-9)

    finding = crash(killed, samples=kernel_samples([2.0] * 20, has_log=True))

    assert finding.end_class == "signal-9"
    assert (
        "killed by signal 9 (SIGKILL) (no trace of the kernel's out-of-memory killer, or of a"
        " fault, in its log)"
    ) in finding.evidence


def test_a_kernel_log_with_a_gap_is_no_evidence_that_nothing_happened() -> None:
    lost_lines = samples("kernel-log-gaps", {("h1", -1): [1.0]})

    finding = crash(
        lost(5, 10.0), samples=join(lost_lines, kernel_samples([2.0] * 20, has_log=True))
    )

    assert "no trace of the kernel's out-of-memory killer)" in finding.evidence


def test_where_the_log_is_not_permitted_the_count_of_kills_is_evidence() -> None:
    counts = [2.0] * 11 + [3.0] * 9

    finding = crash(lost(5, 10.0), samples=kernel_samples(counts, has_log=False))
    before = crash(lost(5, 18.0), samples=kernel_samples(counts, has_log=False))

    assert finding.end_class == "host-oom"
    assert "out-of-memory killer ended 1 process of h1 within 5 s" in finding.evidence
    assert before.end_class == "lost"
    assert "no trace of the kernel's out-of-memory killer" in before.evidence


def test_without_readings_nothing_is_said_of_the_kernel() -> None:
    finding = crash(lost(5, 10.0))

    assert "trace" not in finding.evidence
    assert "no exit record" in finding.evidence


def test_the_launcher_says_how_a_process_ended() -> None:
    text = "failed (exitcode: -11) local_rank: 1 (pid: 77) of binary: python"

    finding = crash(
        lost(5, 10.0), events=[line(5, 10.4, "exit", text, exit_code=-11, file="slurm-1.out")]
    )

    assert finding.end_class == "signal-11"
    assert "killed by signal 11 (SIGSEGV)" in finding.evidence


@pytest.mark.parametrize(
    ("exception", "message"),
    [
        ("UnicodeDecodeError", "'utf-8' codec can't decode byte 0xff in position 0"),
        ("json.decoder.JSONDecodeError", "Expecting value: line 1 column 1 (char 0)"),
        ("pyarrow.lib.ArrowInvalid", "Could not open Parquet input source: magic bytes not found"),
        (
            "UnicodeDecodeError",
            "Caught UnicodeDecodeError in DataLoader worker process 0.\nOriginal Traceback",
        ),
    ],
)
def test_a_document_that_cannot_be_decoded_is_a_class_of_its_own(
    exception: str, message: str
) -> None:
    finding = crash(failed(5, 10.0, exception, message))

    assert finding.end_class == "document"
    assert "bad document" in finding.evidence

"""Notes of hosts on the findings of whole runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.report.document import to_document
from rankscope.analysis.trace.context import EventRecord, RunContext
from tests.analysis.test_analyze import job
from tests.support.analysis.exit_builders import context_of, failed
from tests.support.analysis.sample_builders import join, samples

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.trace.context import SampleTable
    from tests.support.analysis.cluster import Source


S = 1_000_000_000


def on_hosts(source: Source, **context: object) -> Source:
    """Return a job on hosts a to d, each with two ranks, and what is known of them."""
    (epoch,) = source.info.epochs
    ranks = tuple(
        replace(each, host="abcd"[each.rank // 2], local_rank=each.rank % 2, device_name="cpu")
        for each in epoch.ranks
    )
    info = replace(source.info, epochs=(replace(epoch, ranks=ranks),))
    return replace(source, info=info, around=RunContext(**context))  # type: ignore[arg-type]


def notes(report: RunReport) -> dict[str, str]:
    return {note.source: note.text for note in report.top_finding.host_notes}


def everywhere(source: Source, name: str, usual: float, **of: float) -> SampleTable:
    """Return one reading a second over the whole run; ``c=0.5``: of host c, ``c1``: its device."""
    end_s = int(source.step_table.end_ns.max()) // S + 2
    devices = [len(key) > 1 for key in of]
    places = [(host, device) for host in "abcd" for device in ((0, 1) if all(devices) else (-1,))]
    value_of = {(key[0], int(key[1:] or -1)): value for key, value in of.items()}
    rows = {place: [value_of.get(place, usual)] * end_s for place in places}
    return samples(name, rows)


@pytest.fixture(scope="module")
def slow() -> Source:
    return job({5: 1.8})


def on_c(name: str, value: float, beside: SampleTable) -> SampleTable:
    """Return a table and three readings of a process on its third host."""
    own = samples(name, {("c", -1): [value] * 3})
    return join(beside, replace(own, hosts=beside.hosts, host=np.full(3, 2, np.int32)))


def test_the_process_that_took_the_cpus_is_named_beside_the_finding(slow: Source) -> None:
    queue = everywhere(slow, "run-queue-wait-ratio", 0.01, c1=0.45)
    pressure = everywhere(slow, "cpu-pressure-ratio", 0.5)
    table = on_c("process-cpu-cores:burn[77]", 0.97, join(queue, pressure))

    report = analyze_run(on_hosts(slow, samples=table), "tiny")

    assert report.top_finding.ranks == (5,)
    found = notes(report)
    assert found["readings"] == "rank 5: time in wait for a CPU 45 %, peers 1 %"
    assert found["processes"] == (
        "burn (pid 77) took 0.97 CPUs of c, in other steps 0.97; rank 5 had no CPU for 45 % of the"
        " time, other ranks 1 %; some process there had none for 50 %"
    )


@pytest.mark.parametrize(
    ("usual", "of_rank_5"),
    [
        pytest.param(0.4, 0.45, id="all-ranks-wait-alike"),
        pytest.param(0.01, 0.012, id="no-rank-waits"),
    ],
)
def test_a_process_that_keeps_no_rank_waiting_longer_is_not_named(
    slow: Source, usual: float, of_rank_5: float
) -> None:
    queue = everywhere(slow, "run-queue-wait-ratio", usual, c1=of_rank_5)
    table = on_c("process-cpu-cores:burn[77]", 0.97, queue)

    assert notes(analyze_run(on_hosts(slow, samples=table), "tiny")) == {}


def test_who_uses_the_disk_for_which_others_wait_is_named_if_the_waits_deviate(
    slow: Source,
) -> None:
    some = everywhere(slow, "io-pressure-ratio", 0.02, c=0.6)
    all_alike = everywhere(slow, "io-pressure-ratio", 0.6)

    dd = "process-storage-bytes-per-s:dd[9]"
    report = analyze_run(on_hosts(slow, samples=on_c(dd, 2e8, some)), "tiny")

    assert notes(report)["processes"] == (
        "dd (pid 9) moved 191 MiB/s to and from disks of c; some process waited for a disk for 60 %"
        " of the time"
    )
    same = analyze_run(on_hosts(slow, samples=on_c(dd, 2e8, all_alike)), "tiny")
    assert "processes" not in notes(same)


def test_what_was_not_measured_is_said_once(slow: Source) -> None:
    report = analyze_run(on_hosts(slow), "tiny")

    assert notes(report) == {"not measured": "CPU of c"}


def test_stacks_and_the_log_of_the_kernel_are_beside_the_finding(slow: Source) -> None:
    stack = {"step": 4, "threads": [{"name": "MainThread", "frames": ["/x/train.py:7 main"]}]}
    xid = {"class": "xid", "code": 63, "host": "c", "remedy": "watch `nvidia-smi`"}
    events = (
        *(
            EventRecord(epoch=0, rank=rank, at_ns=0, kind="stack", text="", data=stack)
            for rank in (2, 3)
        ),
        EventRecord(epoch=0, rank=-1, at_ns=0, kind="kernel", text="Xid 63: remapped", data=xid),
        EventRecord(
            epoch=0,
            rank=-1,
            at_ns=0,
            kind="kernel",
            text="of a",
            data={"class": "link", "host": "a"},
        ),
    )

    report = analyze_run(on_hosts(slow, events=events), "tiny")

    found = notes(report)
    assert found["stacks"] == "ranks 2 and 3 at x/train.py:7 main"
    assert found["kernel log"] == "Xid 63: remapped on c (watch nvidia-smi)"
    (finding,) = [each for each in to_document(report)["findings"] if each["ranks"] == (5,)]
    assert {note["source"] for note in finding["host_notes"]} == set(found)


def test_a_healthy_run_has_no_notes() -> None:
    report = analyze_run(on_hosts(job({})), "tiny")

    assert report.top_finding.cause == "healthy"
    assert notes(report) == {}


def test_the_first_error_in_the_logs_of_all_ranks_is_beside_a_crash(slow: Source) -> None:
    end_s = int(slow.step_table.end_ns.max()) / S

    def error(rank: int, at_s: float, text: str) -> EventRecord:
        data = {"class": "exception", "host": "c", "file": "stderr.log"}
        at_ns = int((end_s + at_s) * S)
        return EventRecord(epoch=0, rank=rank, at_ns=at_ns, kind="log", text=text, data=data)

    events = (error(4, 1.0, "RuntimeError: closed"), error(5, 0.2, "ValueError: bad token"))
    end = context_of(failed(5, end_s + 1, "ValueError", "bad token"))

    report = analyze_run(on_hosts(slow, events=events, exits=end.exits), "tiny")

    assert report.top_finding.end_class == "exception"
    assert notes(report)["rank logs"] == (
        "first error: rank 5 (exception), ValueError: bad token; then 1 other rank, the first 800"
        " ms later"
    )

"""A running server beside a large simulated job: time to the verdict, memory, and pages.

    python -m benchmarks.live FOLDER [--ranks 12288] [--steps 100] [--step-s 30] [--json FILE]

Writes the spools of all ranks in FOLDER and starts `rankscope serve` on them with an embedded
store. Every ``--step-s`` seconds each rank gets the records of one step: 240 spans, as the tracer
writes them. All ranks are data-parallel and end a step with one all-reduce; from step
4 on, one rank computes half as long again. Twice a second it asks the server through its SQL
gateway for the stored spans and for the newest step that the open finding was checked with, gets a
page, and reads the memory of the process. A step has its verdict when the finding was checked with
it. The spools are of another host, so no process is looked for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.collector.spool.records import RECORD
from rankscope.collector.store.location import read_server_file
from rankscope.tracer.span import KIND_CODES, NONE, SpanFlag, SpanKind
from rankscope.tracer.spool import (
    CORE,
    HAS_COMM,
    HEADER_BYTES,
    RECORD_BYTES,
    STEP,
    RecordType,
)
from tests.support.collector.spool_builder import SpoolBuilder
from tests.support.ports import fixed_port

if TYPE_CHECKING:
    from rankscope.collector.store.location import ServerFile

RUN = "live"
NUM_SPANS = 240
STEP_ROWS = NUM_SPANS + 1
SEGMENT_STEPS = 8
NUM_VARIANTS = 16
"""Different noises, which the ranks share: each would take as long to make as to store."""

ONSET, FACTOR = 4, 1.5
GROUP_ID = 0xD0D0
COMPUTE_SHARE, TRANSFER_S = 0.6, 0.3
"""Computation of a usual rank, over the time from one step to the next; transfer of all."""
POLL_S = 0.5

SELECT_PROGRESS = f"""
SELECT
    (SELECT sum(num_spans) FROM run_totals WHERE run_id = '{RUN}') AS num_spans,
    (SELECT max(checked_step) FROM findings FINAL
     WHERE run_id = '{RUN}' AND cause = 'slow-compute') AS checked_step
FORMAT JSONEachRow
"""  # constants


class Job:
    """The spools of all ranks.

    Args:
        spool: Folder of the spools.
        num_ranks: Ranks of the job.
        step_s: Time from one step to the next. The slow rank computes for most of it.
    """

    def __init__(self, spool: Path, num_ranks: int, step_s: float) -> None:
        self.num_ranks = num_ranks
        self.slow_rank = num_ranks // 3
        self._begin_ns = 10**9
        random = np.random.default_rng(1)
        self._anchor_ns = time.time_ns() - round(step_s * 1e9)  # a step is written when it ends
        self._ranks = [self._rank(spool, rank) for rank in range(num_ranks)]
        self._names = [self._ranks[0].name(name) for name in ("forward", "backward", "all_reduce")]
        usual = COMPUTE_SHARE * step_s * 1e9 / (NUM_SPANS - 1)
        noise = 1 + 0.01 * random.standard_normal((NUM_VARIANTS, NUM_SPANS - 1))
        self._durations = (usual * noise).astype(np.int64)

    def _rank(self, spool: Path, rank: int) -> SpoolBuilder:
        builder = SpoolBuilder(
            spool, run_id=RUN, rank=rank, world_size=self.num_ranks,
            capacity=SEGMENT_STEPS * STEP_ROWS, host=f"host-{rank // 8:05}",
            boot_id=(rank // 8).to_bytes(16, "little"), anchor_unix_ns=self._anchor_ns,
            anchor_monotonic_ns=self._begin_ns,
        )  # fmt: skip
        manifest = builder._manifest()  # the rest of it is as a test has it
        manifest["job"] = "launch-1"
        manifest["layout"] |= {"dp": self.num_ranks}
        manifest["boot_id"] = (rank // 8).to_bytes(16, "little").hex()
        builder.write_json("manifest.json", manifest)
        for name in ("forward", "backward", "all_reduce", "main"):
            builder.name(name)
        if not rank:
            members = list(range(self.num_ranks))
            builder.group(GROUP_ID, kind="dp", name="dp", members=members)
        return builder

    def write_step(self, step: int, step_ns: int) -> None:
        """Write the records of a step that ends now, by the clock of the job."""
        begin_ns = self._begin_ns + step * step_ns
        is_faulty = step >= ONSET
        slow = self._durations[0] * (FACTOR if is_faulty else 1)
        ends = [int(variant.sum()) for variant in self._durations]
        last_ns = begin_ns + max(*ends, int(slow.sum()))
        end_ns = last_ns + int(TRANSFER_S * 1e9)
        shared = [self._records(step, begin_ns, each, end_ns) for each in self._durations]
        own = self._records(step, begin_ns, slow.astype(np.int64), end_ns)
        for rank, builder in enumerate(self._ranks):
            records = own if rank == self.slow_rank else shared[rank % NUM_VARIANTS]
            if builder.next_row == builder.capacity:
                builder.seal()
                builder.new_segment()
            first = builder.next_row
            records["commit"] = HEADER_BYTES + (first + np.arange(STEP_ROWS)) * RECORD_BYTES
            with builder.segment.open("r+b") as file:
                file.seek(HEADER_BYTES + first * RECORD_BYTES)
                file.write(records.tobytes())
            builder.next_row += STEP_ROWS

    def _records(self, step: int, begin_ns: int, durations: Any, end_ns: int) -> Any:  # noqa: ANN401
        """Return the records of one rank's step: computation, an all-reduce, the step itself."""
        records = np.zeros(STEP_ROWS, dtype=RECORD)
        spans, comm = records[: NUM_SPANS - 1], records[NUM_SPANS - 1 : NUM_SPANS]
        edges = begin_ns + np.concatenate([[0], np.cumsum(durations)])
        half = (NUM_SPANS - 1) // 2
        records["type"] = RecordType.SPAN
        records["flags"] = SpanFlag.HOST_CLOCK
        records["step"], records["chunk"], records["track"] = step, 0, self._ranks[0].name("main")
        records["launch_ns"] = NONE
        spans["kind"] = KIND_CODES[SpanKind.FORWARD]
        spans["name"] = self._names[0]
        spans["kind"][half:] = KIND_CODES[SpanKind.BACKWARD]
        spans["name"][half:] = self._names[1]
        spans["microbatch"] = np.arange(NUM_SPANS - 1) % half
        spans["start_ns"], spans["end_ns"] = edges[:-1], edges[1:]
        comm["kind"], comm["name"] = KIND_CODES[SpanKind.DP_COMM], self._names[2]
        comm["flags"] |= HAS_COMM
        comm["microbatch"] = NONE
        comm["start_ns"], comm["end_ns"] = edges[-1], end_ns
        comm["group_id"], comm["seq"], comm["num_bytes"] = GROUP_ID, step, 1 << 26
        comm["src_rank"] = comm["dst_rank"] = NONE
        whole = CORE.pack(
            RecordType.STEP, 0, SpanFlag.HOST_CLOCK, 0, step, NONE, NONE, 0, begin_ns, end_ns, 0, 0,
            NONE,
        )  # fmt: skip
        row = (whole + STEP.pack(1000, 2.0, NONE, 0, 0, 0)).ljust(RECORD_BYTES, b"\0")
        records[NUM_SPANS:] = np.frombuffer(row, dtype=RECORD)
        return records


@dataclass(slots=True)
class Observed:
    """Observations of the server."""

    verdict_s: dict[int, float] = field(default_factory=dict)
    """Time from the end of writing a step to its verdict."""

    memory_mib: list[float] = field(default_factory=list)
    """Anonymous memory of the server, the largest of each step."""

    answer_s: list[float] = field(default_factory=list)
    """Time of each query."""

    page_s: list[float] = field(default_factory=list)
    """Time of each page."""

    cpu_s: float = 0.0
    num_spans: int = 0


def anonymous_mib(pid: int) -> float:
    """Return the anonymous memory of a process, MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0.0


def processor_s(pid: int) -> float:
    """Return the CPU time of a process, s."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask(server: ServerFile, path: str, body: str | None = None) -> tuple[str, float]:
    """Return the answer of the server, and how long it took, s."""
    headers = {"Authorization": f"Bearer {server.token}"}
    data = None if body is None else body.encode()
    request = urllib.request.Request(server.url.rstrip("/") + path, data, headers)
    begun = time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = answer.read().decode()
    return text, time.perf_counter() - begun


def observe(server: ServerFile, pid: int, job: Job, options: argparse.Namespace) -> Observed:
    """Write one step after the other, and observe the server until the last has its verdict."""
    found = Observed()
    step_ns = round(options.step_s * 1e9)
    written_s: dict[int, float] = {}
    begun_s = time.monotonic()
    for step in range(options.steps + options.wait_steps):
        if step < options.steps:
            job.write_step(step, step_ns)
            written_s[step] = time.monotonic()
        largest = 0.0
        while time.monotonic() < begun_s + (step + 1) * options.step_s:
            text, seconds = ask(server, "/", SELECT_PROGRESS)
            found.answer_s.append(seconds)
            progress = json.loads(text)
            found.num_spans = int(progress["num_spans"])
            for each in range(ONSET, int(progress["checked_step"] or -1) + 1):
                found.verdict_s.setdefault(each, time.monotonic() - written_s[each])
            found.page_s.append(ask(server, f"/run/{RUN}")[1])
            largest = max(largest, anonymous_mib(pid))
            time.sleep(POLL_S)
        found.memory_mib.append(largest)
        newest = max(found.verdict_s, default=-1)
        print(
            f"step {step}: {found.num_spans:,} spans stored, verdict up to step {newest},"
            f" {largest:,.0f} MiB, load {os.getloadavg()[0]:.0f}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        if newest == options.steps - 1:
            break
    found.cpu_s = processor_s(pid)
    return found


def main() -> None:
    """Run the server and the job, and print what was observed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=12_288)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-s", type=float, default=30.0)
    parser.add_argument("--wait-steps", type=int, default=4, help="steps to wait after the last")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    store, spool = options.folder / "store", options.folder / "spool"
    begun = time.monotonic()
    job = Job(spool, options.ranks, options.step_s)
    print(f"spools made in {time.monotonic() - begun:.0f} s", file=sys.stderr)
    command = [
        sys.executable, "-m", "rankscope", "serve", "--store", f"chdb://{store.resolve()}",
        "--spool", str(spool), "--port", str(fixed_port()),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while (server := read_server_file(store)) is None or server.pid != process.pid:
                time.sleep(POLL_S)
            found = observe(server, process.pid, job, options)
        finally:
            process.terminate()
    seconds = sorted(found.verdict_s.values())
    result = {
        "ranks": options.ranks, "steps": options.steps, "step_s": options.step_s,
        "spans_per_s": options.ranks * NUM_SPANS / options.step_s, "stored": found.num_spans,
        "written": options.ranks * NUM_SPANS * options.steps, "verdicts": len(seconds),
        "verdict_median_s": statistics.median(seconds) if seconds else None,
        "verdict_max_s": max(seconds, default=None), "memory_mib": found.memory_mib,
        "query_median_s": statistics.median(found.answer_s), "query_max_s": max(found.answer_s),
        "page_median_s": statistics.median(found.page_s), "page_max_s": max(found.page_s),
        "server_cpu_s": found.cpu_s, "load": os.getloadavg(),
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()

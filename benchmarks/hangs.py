"""Accuracy and time of the verdict on simulated hangs of large jobs.

    python -m benchmarks.hangs [--count 1000] [--ranks 12288] [--seed 1] [--only KIND ...]
                               [--out FILE.jsonl]
    python -m benchmarks.hangs --summary FILE.jsonl

Each hang has another layout, rank and place in the step (`benchmarks.hang_jobs`), and a record that
lacks what real records lack: stacks, hosts of which nothing arrived, exact clocks, communication
inside compute. The verdict is that of `analyze_run`, timed in CPU seconds, because the machine may
be shared. It prints the tables of benchmarks/results/hangs.md.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.hang_jobs import (
    COLLECTIVES,
    LIBRARY,
    MS,
    RUN,
    SECOND,
    Do,
    Halt,
    Hang,
    Job,
    Recording,
    Stop,
)
from rankscope.analysis.analyze import analyze_run
from rankscope.memory import without_collection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random


class Kind(StrEnum):
    """Causes that stop the job."""

    COMPUTE = "stops in compute"
    OTHER_COLLECTIVE = "calls another collective"
    DATA_LOADER = "waits for its data loader"
    STORAGE = "waits for storage"
    DRIVER = "waits for its driver"
    NEVER_JOINED = "never joined"
    KILLED = "is killed"
    DEAD_HOST = "its host dies"
    PARTITION = "two hosts lose their connection"


CLASSES = {
    Kind.COMPUTE: "never-joined",
    Kind.OTHER_COLLECTIVE: "other-collective",
    Kind.DATA_LOADER: "data-loader",
    Kind.STORAGE: "storage",
    Kind.DRIVER: "driver",
    Kind.NEVER_JOINED: "never-joined",
    Kind.KILLED: "signal-9",
    Kind.DEAD_HOST: "never-joined",
    Kind.PARTITION: "collective",
}

COMPUTE_FRAMES = (
    ("/job/model.py:88 route_tokens",),
    (
        f"{LIBRARY}/torch/nn/modules/module.py:1750 Module._call_impl",
        "/job/model.py:41 Block.forward",
    ),
    (f"{LIBRARY}/torch/_inductor/async_compile.py:330 AsyncCompile.wait",),
)
LOADER_FRAMES = (
    (
        "/usr/lib/python3.11/threading.py:331 Condition.wait",
        "/usr/lib/python3.11/queue.py:180 Queue.get",
        f"{LIBRARY}/torch/utils/data/dataloader.py:1284 Iterator._try_get_data",
    ),
    (
        "/job/data.py:71 Shards.__getitem__",
        f"{LIBRARY}/torch/utils/data/_utils/fetch.py:54 _MapDatasetFetcher.fetch",
    ),
)
STORAGE_FRAMES = (
    (f"{LIBRARY}/torch/serialization.py:850 save", "/job/checkpoint.py:33 write"),
    (
        "/usr/lib/python3.11/threading.py:331 Condition.wait",
        f"{LIBRARY}/fsspec/asyn.py:91 sync",
        "/job/data.py:64 Shards._open",
    ),
    (f"{LIBRARY}/torch/distributed/checkpoint/filesystem.py:331 _write_item",),
)
DRIVER_FRAMES = (
    (f"{LIBRARY}/torch/cuda/__init__.py:985 synchronize",),
    (f"{LIBRARY}/torch/cuda/streams.py:224 Event.synchronize", "/job/train.py:188 drain"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A hang with its right answer."""

    number: int
    kind: Kind
    job: Job
    hang: Hang
    ranks: tuple[int, ...]
    """The right answer; of a partition, the ranks of both hosts."""

    doubt: str = ""
    """Why the record can't show it; "" if it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The verdict on one hang."""

    number: int
    kind: str
    layout: str
    num_spans: int
    ranks: tuple[int, ...]
    cause: str
    named: tuple[int, ...]
    end_class: str
    verdict: str
    """"right", "wrong", or "undecided" if the record can't show it and nothing wrong was named."""

    is_class_right: bool
    doubt: str
    analyze_s: float
    """CPU seconds of the verdict."""

    evidence: str


def make_job(rng: Random, num_ranks: int, *, step: int, saves: bool) -> Job:
    """Return a random layout and program."""
    pp, tp = rng.choice((1, 1, 2, 4, 8, 16)), rng.choice((1, 2, 4, 8))
    return Job(
        pp=pp,
        dp=num_ranks // (pp * tp),
        tp=tp,
        is_pp_inner=rng.random() < 0.3,
        num_microbatches=rng.randint(1, 3) if pp == 1 else rng.randint(2, 6),
        num_buckets=rng.randint(1, 4),
        traces_tp=rng.random() < 0.8,
        waits_in_sends=rng.random() < 0.5,
        reduces_norm=rng.random() < 0.7,
        saves=saves,
        step=step,
    )


def make_case(number: int, kind: Kind, *, num_ranks: int, seed: int) -> Case:
    """Return a random hang of this kind."""
    rng = random.Random(f"{seed}/{number}")
    step = 0 if kind is Kind.NEVER_JOINED else rng.randint(1, 5000)
    saves = kind is Kind.STORAGE and rng.random() < 0.5
    job = make_job(rng, num_ranks, step=step, saves=saves)
    rank = rng.randrange(num_ranks)
    if kind is Kind.DATA_LOADER:
        rank = int(rng.choice(job.rank[rng.choice((0, job.pp - 1))].ravel().tolist()))
    hang, ranks = MAKERS[kind](rng, job, rank)
    num_hosts = num_ranks // job.ranks_per_host
    hang = replace(
        hang,
        stack_share=rng.choice((1.0, 1.0, 0.9, 0.0)),
        offset_ns={
            host: rng.gauss(0.0, 0.5 * MS) for host in rng.sample(range(num_hosts), num_hosts // 3)
        },
    )
    if kind is not Kind.DEAD_HOST and rng.random() < 0.3:
        late = frozenset(rng.sample(range(num_hosts), rng.randint(1, max(1, num_hosts // 200))))
        hang = replace(hang, unshipped_hosts=late, lag_ns=rng.uniform(0.0, 20.0) * SECOND)
    return Case(
        number=number,
        kind=kind,
        job=job,
        hang=hang,
        ranks=ranks,
        doubt=find_doubt(kind, job, hang, ranks),
    )


def find_doubt(kind: Kind, job: Job, hang: Hang, ranks: tuple[int, ...]) -> str:
    """Return why no reader of the record could name the ranks; "" if it shows them."""
    if kind is Kind.PARTITION:
        return "all members have entered a collective: any pair of its hosts may be cut off"
    if hang.unshipped_hosts & {rank // job.ranks_per_host for rank in ranks}:
        return "nothing of its host arrived, nor of others"
    is_inside = any(halt.stop is Stop.INSIDE for halt in hang.halts)
    if not job.traces_tp and job.tp > 1 and is_inside and hang.stack_share < 1.0:
        return "its tensor-parallel partners have the same spans, and stacks are missing"
    return ""


def _ops(job: Job, rank: int, *, wanted: Callable[[Any], bool]) -> list[int]:
    stage, _, _ = job.position(rank)
    return [number for number, op in enumerate(job.program(stage)) if wanted(op)]


def _halt(
    rng: Random, job: Job, rank: int, *, dos: set[Do], stop: Stop, kinds: set[str] | None = None
) -> Halt:
    ops = _ops(job, rank, wanted=lambda op: op.do in dos and (kinds is None or op.kind in kinds))
    return Halt(rank=rank, op=rng.choice(ops), stop=stop)


def _compute(rng: Random, job: Job, rank: int) -> tuple[Hang, tuple[int, ...]]:
    stop = rng.choice((Stop.INSIDE, Stop.INSIDE, Stop.BEFORE))
    dos = {Do.BEGIN} if stop is Stop.INSIDE else {Do.BEGIN, Do.DP, Do.WORLD}
    halt = _halt(rng, job, rank, dos=dos, stop=stop)
    return Hang(halts=(halt,), frames=rng.choice(COMPUTE_FRAMES)), (rank,)


def _other_collective(rng: Random, job: Job, rank: int) -> tuple[Hang, tuple[int, ...]]:
    halt = _halt(rng, job, rank, dos=set(COLLECTIVES), stop=Stop.ELSEWHERE)
    stage, _, _ = job.position(rank)
    do = job.program(stage)[halt.op].do
    groups = [
        Do.WORLD,
        *([Do.DP] if job.dp > 1 else []),
        *([Do.TP] if job.tp > 1 and job.traces_tp else []),
    ]
    other = rng.choice([do if do in groups else Do.WORLD, rng.choice(groups)])
    frames = (f"{LIBRARY}/torch/distributed/distributed_c10d.py:2421 broadcast",)
    return Hang(halts=(replace(halt, other=(other, "broadcast")),), frames=frames), (rank,)


def _data_loader(rng: Random, job: Job, rank: int) -> tuple[Hang, tuple[int, ...]]:
    halt = _halt(rng, job, rank, dos={Do.LOCAL}, kinds={"data"}, stop=Stop.INSIDE)
    return Hang(halts=(halt,), frames=rng.choice(LOADER_FRAMES)), (rank,)


def _storage(rng: Random, job: Job, rank: int) -> tuple[Hang, tuple[int, ...]]:
    if job.saves:
        halt = _halt(rng, job, rank, dos={Do.LOCAL}, kinds={"checkpoint"}, stop=Stop.INSIDE)
        return Hang(halts=(halt,), frames=STORAGE_FRAMES[0]), (rank,)
    halt = _halt(rng, job, rank, dos={Do.BEGIN, Do.DP}, stop=Stop.BEFORE)
    if rng.random() < 0.5:
        return Hang(halts=(halt,), frames=rng.choice(STORAGE_FRAMES)), (rank,)
    call = "openat /mnt/data/shard-0017.tar"
    return Hang(halts=(halt,), frames=("/job/data.py:64 Shards._open",), call=call), (rank,)


def _driver(rng: Random, job: Job, rank: int) -> tuple[Hang, tuple[int, ...]]:
    halt = _halt(rng, job, rank, dos={Do.BEGIN}, stop=rng.choice((Stop.INSIDE, Stop.BEFORE)))
    return Hang(halts=(halt,), frames=rng.choice(DRIVER_FRAMES)), (rank,)


def _never_joined(rng: Random, job: Job, rank: int) -> tuple[Hang, tuple[int, ...]]:
    absent = frozenset({rank} if rng.random() < 0.5 else ())
    halt = Halt(rank=rank, op=0, stop=Stop.BEFORE)
    return Hang(halts=(halt,), absent=absent, frames=("/job/train.py:44 build_model",)), (rank,)


def _killed(rng: Random, job: Job, rank: int) -> tuple[Hang, tuple[int, ...]]:
    dead = frozenset({rank})
    return Hang(dead_ranks=dead, at_ns=_any_time(rng, job), is_killed=True), (rank,)


def _dead_host(rng: Random, job: Job, rank: int) -> tuple[Hang, tuple[int, ...]]:
    first = rank - rank % job.ranks_per_host
    ranks = tuple(range(first, first + job.ranks_per_host))
    lag_ns = rng.uniform(0.0, 5.0) * SECOND
    return Hang(dead_ranks=frozenset(ranks), at_ns=_any_time(rng, job), lag_ns=lag_ns), ranks


def _partition(rng: Random, job: Job, rank: int) -> tuple[Hang, tuple[int, ...]]:
    hosts = rng.sample(range(job.world_size // job.ranks_per_host), 2)
    ranks = tuple(
        rank
        for host in sorted(hosts)
        for rank in range(host * job.ranks_per_host, (host + 1) * job.ranks_per_host)
    )
    return Hang(parted_hosts=frozenset(hosts), at_ns=_any_time(rng, job)), ranks


def _any_time(rng: Random, job: Job) -> float:
    """Return a time in the step, before its end."""
    num = 2 * (job.num_microbatches + job.pp - 1)
    return rng.uniform(0.0, num * job.compute_ms * MS)


MAKERS: dict[Kind, Callable[[Random, Job, int], tuple[Hang, tuple[int, ...]]]] = {
    Kind.COMPUTE: _compute,
    Kind.OTHER_COLLECTIVE: _other_collective,
    Kind.DATA_LOADER: _data_loader,
    Kind.STORAGE: _storage,
    Kind.DRIVER: _driver,
    Kind.NEVER_JOINED: _never_joined,
    Kind.KILLED: _killed,
    Kind.DEAD_HOST: _dead_host,
    Kind.PARTITION: _partition,
}


def judge(case: Case, *, seed: int) -> Result:
    """Analyse one hang, and compare the verdict with the right answer."""
    source = Recording(case.job, case.hang, seed=seed + case.number)
    begin = time.process_time()
    with without_collection():  # as `rankscope analyze` and the server's analysis do
        report = analyze_run(source, RUN)
    analyze_s = time.process_time() - begin
    top = report.top_finding
    named, truth = set(top.ranks), set(case.ranks)
    cause = "crash" if case.kind is Kind.KILLED else "hang"
    is_right = top.cause == cause and named == truth
    if not is_right and case.doubt:
        alike = {case.job.position(rank)[:2] for rank in truth}
        others = {rank for rank in named - truth if case.job.position(rank)[:2] not in alike}
        is_known_wrong = bool(others or (named and not named & truth))
        verdict = "wrong" if is_known_wrong else "undecided"
    else:
        verdict = "right" if is_right else "wrong"
    job = case.job
    return Result(
        number=case.number,
        kind=case.kind.name.lower().replace("_", "-"),
        layout=f"pp {job.pp} x dp {job.dp} x tp {job.tp}",
        num_spans=report.num_spans,
        ranks=case.ranks,
        cause=top.cause,
        named=top.ranks,
        end_class=top.end_class,
        verdict=verdict,
        is_class_right=top.end_class == _right_class(case, has_stacks=source.has_stacks),
        doubt=case.doubt,
        analyze_s=analyze_s,
        evidence=top.evidence,
    )


def _right_class(case: Case, *, has_stacks: bool) -> str:
    """Return the class that the record shows: without stacks only an open span does."""
    spans = {Kind.DATA_LOADER} | ({Kind.STORAGE} if case.job.saves else set())
    by_stack = {Kind.DRIVER, Kind.STORAGE} - spans
    return CLASSES[Kind.COMPUTE if case.kind in by_stack and not has_stacks else case.kind]


def summary(results: list[dict[str, Any]]) -> str:
    """Return the table by kind."""
    lines = [
        "| hang | hangs | right | wrong | undecided | right class | CPU s, median | worst |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    kinds = [kind.name.lower().replace("_", "-") for kind in Kind]
    for kind in [*kinds, "all"]:
        mine = [result for result in results if kind in {"all", result["kind"]}]
        if not mine:
            continue
        counts = [
            sum(each["verdict"] == word for each in mine)
            for word in ("right", "wrong", "undecided")
        ]
        num_class = sum(each["is_class_right"] for each in mine)
        times = [each["analyze_s"] for each in mine]
        cells = (kind, len(mine), *counts, num_class, f"{median(times):.2f}", f"{max(times):.2f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the hangs, each kind in turn."""
    kinds = [Kind[name.upper().replace("-", "_")] for name in options.only] or list(Kind)
    for number in range(options.first, options.first + options.count):
        yield make_case(
            number, kinds[number % len(kinds)], num_ranks=options.ranks, seed=options.seed
        )


def main() -> None:
    """Judge the hangs, or summarise results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first hang")
    parser.add_argument("--ranks", type=int, default=12_288)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=(), metavar="KIND")
    parser.add_argument("--out", type=Path, default=Path("hangs.jsonl"))
    parser.add_argument("--summary", type=Path, help="print the table of an earlier run")
    options = parser.parse_args()
    if options.summary is None:
        with options.out.open("w") as out:
            for case in cases(options):
                result = judge(case, seed=options.seed)
                out.write(json.dumps(asdict(result)) + "\n")
                out.flush()
                print(
                    f"\r{case.number + 1 - options.first} of {options.count}",
                    end="",
                    file=sys.stderr,
                )
        peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(f"\npeak {peak_gb:.2f} GB", file=sys.stderr)
    lines = (options.summary or options.out).read_text().splitlines()
    print(summary([json.loads(line) for line in lines]))


if __name__ == "__main__":
    main()

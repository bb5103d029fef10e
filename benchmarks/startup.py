"""Start-up of process groups on one machine: stores against each other, from 8 to 64 processes.

    python -m benchmarks.startup [--sizes 8 16 32 64] [--repeats 3] [--out FILE.md]

Each process is a fork of one that has imported `torch.distributed`, so only the store and gloo are
measured. All processes connect to a store, wait for each other `NUM_BARRIERS` times through it,
make the group of the whole job, and then groups of `GROUP_SIZE`: all of them in each process (what
`init_device_mesh` and `new_group` do), or only the own one (``use_local_synchronization``). A
`HashStore` lives in one process, so threads wait for each other through it, and there is no group.
Times are from the first begin to the last end of a phase, the median of the repeats; the processor
time is that of all processes, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import resource
import signal
import socket
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

GROUP_SIZE = 8
NUM_BARRIERS = 5
TIMEOUT = timedelta(seconds=120)
PHASES = ("connect", "barrier", "group of all", "groups of 8", "own groups of 8")


class Phase(NamedTuple):
    """Begin and end of a phase on one process, in seconds of the monotonic clock."""

    begin_s: float
    end_s: float


def tcp_store(rank: int, size: int, place: str, *, use_libuv: bool) -> Store:
    """Return the client of a `TCPStore`, whose server is in rank 0."""
    return TCPStore(
        "127.0.0.1", int(place), size, is_master=rank == 0, timeout=TIMEOUT, use_libuv=use_libuv
    )


STORES: dict[str, Callable[[int, int, str], Store]] = {
    "TCPStore, libuv": lambda rank, size, place: tcp_store(rank, size, place, use_libuv=True),
    "TCPStore, threads": lambda rank, size, place: tcp_store(rank, size, place, use_libuv=False),
    "FileStore": lambda rank, size, place: FileStore(place, size),
}
"""Stores that several processes share, by name: from rank, size and place."""

HASH_STORE = "HashStore, threads of one process"


def wait_for_all(store: Store, rank: int, size: int, name: str) -> None:
    """Wait until ``size`` ranks are here: one counter, and a key that the last one sets."""
    if store.add(f"{name}/count", 1) == size:
        store.set(f"{name}/all", str(rank))
    store.wait([f"{name}/all"], TIMEOUT)


def run_rank(name: str, rank: int, size: int, place: str) -> list[Phase]:
    """Go through all phases as one process."""
    times = [time.monotonic()]
    store = STORES[name](rank, size, place)
    times.append(time.monotonic())
    for number in range(NUM_BARRIERS):
        wait_for_all(store, rank, size, f"barrier-{number}")
    times.append(time.monotonic())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    times.append(time.monotonic())
    members = [range(first, first + GROUP_SIZE) for first in range(0, size, GROUP_SIZE)]
    for ranks in members:
        dist.new_group([*ranks])
    times.append(time.monotonic())
    dist.new_group([*members[rank // GROUP_SIZE]], use_local_synchronization=True)
    times.append(time.monotonic())
    dist.barrier()
    return [Phase(*both) for both in itertools.pairwise(times)]


def run_child(answer: Connection, name: str, rank: int, size: int, place: str) -> None:
    """Send the phases of one process to its parent."""
    torch.set_num_threads(1)
    answer.send(run_rank(name, rank, size, place))
    answer.recv()  # the server of the store must stay until all have ended
    os._exit(0)


def measure(name: str, size: int, place: str) -> list[float]:
    """Return the seconds of each phase over all processes, of all phases, and their memory in MB.

    The memory is what a process shares with no other.
    """
    context = get_context("fork")
    pipes = [context.Pipe() for _ in range(size)]
    children = [
        context.Process(target=run_child, args=(theirs, name, rank, size, place))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for child in children:
        child.start()
    try:
        answers: list[list[Phase]] = []
        for ours, _ in pipes:
            if not ours.poll(TIMEOUT.total_seconds()):
                raise TimeoutError(f"{name} with {size} processes took more than {TIMEOUT}")
            answers.append(ours.recv())
        memory_mb = sum(own_bytes(child.pid or 0) for child in children) / 1e6
        for ours, _ in pipes:
            ours.send(None)
    finally:
        for child in children:
            child.join(1.0)
            if child.is_alive() and child.pid is not None:
                os.kill(child.pid, signal.SIGKILL)
                child.join()
    by_phase = [*zip(*answers, strict=True), [*itertools.chain(*answers)]]
    return [
        *(
            max(phase.end_s for phase in phases) - min(phase.begin_s for phase in phases)
            for phases in by_phase
        ),
        memory_mb,
    ]


def measure_hash_store(size: int) -> list[float]:
    """Return the seconds of the barriers of threads through a `HashStore`, the only phase."""
    store = HashStore()

    def run(rank: int) -> None:
        for number in range(NUM_BARRIERS):
            wait_for_all(store, rank, size, f"barrier-{number}")

    threads = [Thread(target=run, args=(rank,)) for rank in range(size)]
    begin_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    unknown = math.nan
    return [unknown, time.monotonic() - begin_s, *[unknown] * len(PHASES)]


def own_bytes(pid: int) -> int:
    """Return the memory that a process shares with no other, in bytes."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    lines = (line.split() for line in rollup.splitlines())
    return 1024 * sum(int(line[1]) for line in lines if line[0].startswith("Private_"))


def places(folder: str) -> Iterator[str]:
    """Yield a place for a `FileStore`, or a free port for a `TCPStore`, in turn."""
    number = 0
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        yield port
        yield f"{folder}/store-{number}"
        number += 1


def rows(sizes: list[int], num_repeats: int) -> Iterator[str]:
    """Yield the rows of the table as they are measured."""
    with tempfile.TemporaryDirectory() as folder:
        place = places(folder)
        for size in sizes:
            for name in (*STORES, HASH_STORE):
                repeats, before_s = [], cpu_seconds()
                for _ in range(num_repeats):
                    port, path = next(place), next(place)
                    if name == HASH_STORE:
                        repeats.append(measure_hash_store(size))
                    else:
                        repeats.append(measure(name, size, path if "File" in name else port))
                columns = [statistics.median(values) for values in zip(*repeats, strict=True)]
                columns.append((cpu_seconds() - before_s) / num_repeats)
                columns.append(os.getloadavg()[0])
                shown = ("" if math.isnan(value) else f"{value:.3g}" for value in columns)
                yield f"| {size} | {name} | {' | '.join(shown)} |"


def cpu_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def main(arguments: list[str]) -> None:
    """Print the table, and write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    lines = [
        f"| processes | store | {' | '.join(PHASES)} | all, s | memory, MB | CPU, s | load |",
        f"| ---: | --- |{' ---: |' * (len(PHASES) + 4)}",
    ]
    print(*lines, sep="\n")
    for row in rows(args.sizes, args.repeats):
        print(row, flush=True)
        lines.append(row)
    if args.out is not None:
        args.out.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

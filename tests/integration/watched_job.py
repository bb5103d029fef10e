"""A gloo job of a few light ranks, and the parts of the agent that watch it, in this process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.collector.host.host_events import HostEventRows
from rankscope.collector.host.kernel_log import KERNEL_LOG
from rankscope.collector.spool.tail import SegmentPolicy, SpoolTail
from rankscope.collector.store.writer import StoreWriter
from rankscope.server.host_sampling import HostSampling
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankscope.collector.store.store import Store

WITHIN_S = 120.0
MANY_STEPS = 10_000
TURN_S = 0.5
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
WORK_S = 0.02
"""Host work of each rank in each micro-batch. All but the pinned one sleep instead: a light job."""


class Watch:
    """The parts of `rankscope serve --spool --samples`, without the server."""

    def __init__(
        self, store: Store, spool: Path, *, kernel_log: Path = KERNEL_LOG, logs: Sequence[str] = ()
    ) -> None:
        self._writer = StoreWriter(store)
        self._tail = SpoolTail(spool, self._writer, segment_policy=SegmentPolicy.DELETE)
        self._rows = HostEventRows(socket.gethostname(), unix_ns=time.time_ns)
        self._sampling = HostSampling(spool, kernel_log=kernel_log, rank_logs=logs)

    def turn(self) -> int:
        """Read everything once; return how many ranks run."""
        self._sampling.sampler.turn()
        progress = self._tail.poll()
        self._rows.note_running(self._tail.running)
        self._rows.send(self._sampling.events.take(), self._writer.upsert)
        self._sampling.store(self._writer.upsert, placed=self._tail.placed_heartbeats)
        return progress.num_running

    def close(self) -> None:
        self._sampling.close()
        self._tail.close()


@contextmanager
def start_ranks(
    folder: Path, num_ranks: int, num_steps: int, *, pinned: int | None = None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run the ranks of this module, each a process; all are gone at the end.

    Args:
        folder: Gets the spool, the rendezvous and a log of each rank.
        num_ranks: Number of ranks.
        num_steps: Number of steps.
        pinned: Rank that has the last processor to itself, and works instead of sleeping.
    """
    ranks = []
    (folder / "logs").mkdir()
    try:
        for rank in range(num_ranks):
            with (folder / "logs" / f"rank-{rank}.log").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [
                            *(sys.executable, "-m", __name__, str(rank), str(num_ranks)),
                            *(str(num_steps), str(folder), str(pinned)),
                        ],
                        cwd=ROOT,
                        env={**os.environ, **ENVIRONMENT, "LOCAL_RANK": str(rank)},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield ranks
    finally:
        for process in ranks:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


def spool_of(folder: Path) -> Path:
    return folder / "spool"


@contextmanager
def watched(
    store: Store,
    folder: Path,
    num_ranks: int,
    *,
    step: int = 5,
    pinned: int | None = None,
    **options: Any,  # noqa: ANN401
) -> Iterator[tuple[Watch, list[subprocess.Popen[bytes]]]]:
    """Run ranks until a step, in the block, and until they have ended; store what is seen."""
    with start_ranks(folder, num_ranks, MANY_STEPS, pinned=pinned) as ranks:
        watch = Watch(store, spool_of(folder), **options)
        reach_step(watch, ranks, folder, step)
        yield watch, ranks
        drain(watch, ranks)
        watch.close()


def reach_step(
    watch: Watch, ranks: Sequence[subprocess.Popen[bytes]], folder: Path, step: int
) -> None:
    """Take turns until rank 0 has ended a step."""
    deadline_s = time.monotonic() + WITHIN_S
    mark = folder / "step"
    while not mark.exists() or int(mark.read_text() or 0) < step:
        assert time.monotonic() < deadline_s, (folder / "logs" / "rank-0.log").read_text()
        assert all(process.poll() is None for process in ranks)
        watch.turn()
        time.sleep(TURN_S)
    for _ in range(2):  # the ranks may have begun after the last turn
        watch.turn()


def drain(watch: Watch, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Take turns until all ranks have ended, and what follows them was read."""
    deadline_s = time.monotonic() + WITHIN_S
    while watch.turn() or any(process.poll() is None for process in ranks):
        assert time.monotonic() < deadline_s
        time.sleep(TURN_S)
    for _ in range(3):
        time.sleep(TURN_S)
        watch.turn()


def _stop_if_asked(folder: Path) -> None:
    """Stop as the file says that a test has made: in the folder's fault of that name."""
    import torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    class Asleep(Dataset[int]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            time.sleep(WITHIN_S)
            return index

    if (folder / "loader").exists():
        next(iter(DataLoader(Asleep())))
    if (folder / "workers").exists():
        next(iter(DataLoader(Asleep(), num_workers=1)))
    if (folder / "fifo").exists():
        (folder / "fifo").read_bytes()  # a pipe that nothing writes to
    if (folder / "barrier").exists():
        dist.barrier()
    if (folder / "sleep").exists():
        time.sleep(WITHIN_S)
    if (folder / "raise").exists():
        json.loads((folder / "raise").read_text())


def _work(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def main(rank: int, world: int, num_steps: int, folder: Path, pinned: int | None) -> None:
    """Train as one rank; rank 1 stops, or allocates without end, once there is a file for that."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from rankscope import tracer
    from rankscope.tracer.topology import Layout

    processors = sorted(os.sched_getaffinity(0))
    if rank == pinned:
        os.sched_setaffinity(0, {processors[-1]})
    elif pinned is not None and len(processors) > 1:
        os.sched_setaffinity(0, set(processors[:-1]))
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "rendezvous"), world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tracer.install(spool=spool_of(folder), run="watched", model=model, layout=Layout(dp=world))
    kept: list[bytearray] = []
    for step in range(num_steps):
        optimizer.zero_grad()
        for _ in range(2):
            loss = model(torch.ones(8, 64)).square().mean()
            _work(WORK_S) if rank == pinned else time.sleep(WORK_S)
            loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        tracer.step(tokens=8)
        if rank == 0:
            (folder / "step").write_text(str(step))
        if rank == 1 and (folder / "grow").exists():
            kept.append(bytearray(b"x" * (32 << 20)))
        if rank == 1:
            _stop_if_asked(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank, _world, _steps, _folder, _pinned = sys.argv[1:]
    _only = None if _pinned == "None" else int(_pinned)
    main(int(_rank), int(_world), int(_steps), Path(_folder), _only)

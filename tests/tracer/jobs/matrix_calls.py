"""Every call of `torch.distributed` that a job may make, on four gloo ranks."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d

WORLD = 4


class Calls:
    """One round of all calls; their results are summed, so that a changed value shows."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        self.half = self.halves[rank % 2]
        self.world = distributed_c10d._get_default_group()
        self.own_thread = dist.new_group(list(range(WORLD)))

    def __call__(self) -> float:
        """Return the sum of everything that was received."""
        total = self.rooted() + self.lists() + self.single() + self.objects()
        total += self.late_waits() + self.coalesced() + self.p2p() + self.functional()
        self.barriers()
        return total + self.thread()

    def mine(self, size: int = 4) -> torch.Tensor:
        """Return a tensor whose value identifies this rank."""
        return torch.arange(size, dtype=torch.float32) + self.rank

    def rooted(self) -> float:
        """Broadcast, reduce, scatter and gather, in the world and in a group of two."""
        values = self.mine()
        everyone = [torch.empty(4) for _ in range(WORLD)]
        dist.broadcast(values, src=1)
        dist.reduce(values, dst=3)
        dist.gather(self.mine(), everyone if self.rank == 0 else None, dst=0)
        part = torch.empty(4)
        parts = [torch.full((4,), float(index)) for index in range(WORLD)]
        dist.scatter(part, parts if self.rank == 2 else None, src=2)
        dist.broadcast(values, src=self.rank % 2, group=self.half)
        dist.all_reduce(values, group=self.half)
        return float(values.sum() + part.sum())

    def lists(self) -> float:
        """Return the results of collectives over lists of tensors."""
        gathered = [torch.empty(3) for _ in range(WORLD)]
        dist.all_gather(gathered, self.mine(3))
        reduced = torch.empty(3)
        dist.reduce_scatter(reduced, [self.mine(3) for _ in range(WORLD)])
        received = [torch.empty(2) for _ in range(WORLD)]
        dist.all_to_all(received, [self.mine(2) for _ in range(WORLD)])
        return float(sum(map(torch.sum, [*gathered, reduced, *received])))

    def single(self) -> float:
        """Return the results of collectives over one tensor: uneven splits and a sparse one too."""
        gathered = torch.empty(WORLD * 5)
        dist.all_gather_single(gathered, self.mine(5))
        reduced = torch.empty(5)
        dist.reduce_scatter_single(reduced, gathered)
        # Rank r sends r + 1 numbers to each rank, so it receives 1 + 2 + 3 + 4.
        uneven = torch.empty(10)
        sent = self.mine(WORLD * (self.rank + 1))
        dist.all_to_all_single(uneven, sent, [1, 2, 3, 4], [self.rank + 1] * WORLD)
        with torch.inference_mode():
            total = torch.ones(2)
            dist.all_reduce(total)
        sparse = torch.eye(WORLD)[self.rank].to_sparse()
        dist.all_reduce(sparse)
        return float(gathered.sum() + reduced.sum() + uneven.sum() + total.sum())

    def objects(self) -> float:
        """Return the results of collectives of pickled objects."""
        everyone: list[Any] = [None] * WORLD
        dist.all_gather_object(everyone, {"rank": self.rank})
        objects: list[Any] = [{"root": 5}] if self.rank == 0 else [None]
        dist.broadcast_object_list(objects, src=0)
        dist.gather_object(self.rank, everyone if self.rank == 1 else None, dst=1)
        part: list[Any] = [None]
        dist.scatter_object_list(part, [7, 8, 9, 10] if self.rank == 3 else None, src=3)
        if self.rank == 0:
            dist.send_object_list(["hello"], dst=2)
        if self.rank == 2:
            dist.recv_object_list(objects, src=0)
        return float(part[0])

    def late_waits(self) -> float:
        """Launch several, wait in the opposite order, twice for one, and never for one."""
        tensors = [self.mine() for _ in range(4)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        product = torch.ones(64, 64) @ torch.ones(64, 64)
        for work in reversed(works[1:]):
            work.wait()
        works[1].wait()
        dist.barrier()  # so that the one without a wait has ended
        return float(product[0, 0] + sum(map(torch.sum, tensors[1:])))

    def coalesced(self) -> float:
        """Return the results of coalesced collectives, waited for now and later."""
        first, second = self.mine(), self.mine(2)
        with distributed_c10d._coalescing_manager():
            dist.all_reduce(first)
            dist.all_reduce(second)
        with distributed_c10d._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(first)
            dist.all_reduce(second)
        manager.wait()
        return float(first.sum() + second.sum())

    def p2p(self) -> float:
        """Send round the ring in one batch, then to rank 0 from any source."""
        right, left = (self.rank + 1) % WORLD, (self.rank - 1) % WORLD
        received = torch.empty(4)
        ring = [dist.P2POp(dist.isend, self.mine(), right), dist.P2POp(dist.irecv, received, left)]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        total = float(received.sum())
        if self.rank == 0:
            for _ in range(WORLD - 1):
                dist.recv(received)
                total += float(received.sum())
        else:
            dist.send(self.mine(), dst=0)
        dist.barrier()  # else rank 0 might receive the next send for one of those
        # After those of unknown source: the numbers of the pair must still agree.
        if self.rank == 3:
            wait_for(dist.isend(self.mine(), dst=0))
        if self.rank == 0:
            wait_for(dist.irecv(received, src=3))
            total += float(received.sum())
        return total

    def functional(self) -> float:
        """Return the results of functional collectives, waited for when their value is used."""
        summed = functional.all_reduce(self.mine(), "sum", self.world)
        gathered = functional.all_gather_tensor(self.mine(), 0, self.world)
        both = functional.all_reduce_coalesced([self.mine(), self.mine(2)], "sum", self.half)
        source = nn.Parameter(self.mine(6))
        # Two numbers to the first member of this half, four to the second.
        got = functional.all_to_all_single_autograd(
            source * 2, [2, 2] if self.rank < 2 else [4, 4], [2, 4], self.half
        )
        loss = got.square().sum() + gathered.sum() + summed.sum() + sum(map(torch.sum, both))
        loss.backward()
        assert source.grad is not None
        return float(loss + source.grad.sum())

    def barriers(self) -> None:
        """Meet at both kinds of barriers."""
        dist.barrier()
        dist.monitored_barrier(timeout=timedelta(seconds=30))

    def thread(self) -> float:
        """Return what a second thread reduced in its own group."""
        values = self.mine()

        def reduce() -> None:
            dist.all_reduce(values, group=self.own_thread)

        worker = threading.Thread(target=reduce, name="second")
        worker.start()
        worker.join()
        return float(values.sum())


def plain_calls(rank: int) -> None:
    """Make the calls that each version of torch has on gloo."""
    world = dist.get_world_size()
    mine = torch.full((4,), float(rank))
    everyone = [torch.empty(4) for _ in range(world)]
    dist.all_gather(everyone, mine)
    dist.broadcast(mine, src=1)
    dist.reduce(mine, dst=0)
    dist.barrier()
    dist.scatter(mine, everyone if rank == 2 else None, src=2)
    dist.gather(mine, everyone if rank == 0 else None, dst=0)
    dist.all_to_all_single(torch.empty(4), torch.ones(4))
    wait_for(dist.all_reduce(mine, async_op=True))
    with torch.inference_mode():
        dist.all_reduce(torch.ones(2))
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    if rank == 0:
        dist.send(mine, dst=3)
    if rank == 3:
        dist.recv(mine, src=0)


def wait_for(work: dist.Work | None) -> None:
    """Wait for the works in which this rank takes part."""
    assert work is not None
    work.wait()


def calls(rank: int) -> tuple[nn.Module | None, Any]:
    """Only calls, without a model."""
    return None, Calls(rank)

"""Communication of data parallelism behind compute: weights are gathered ahead, gradients early.

On CUDA that is FSDP2's own, on streams. On gloo FSDP2 gathers ahead, but blocks its thread in each
reduction: there `EarlyReduction` launches them without waiting.

Source:
    Jiang et al., "MegaScale" (arXiv 2402.15627), section 3.2.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


def gather_ahead(stage: nn.Module) -> None:
    """Launch the gathering of all weights; the forward of each module waits for its own."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.unshard(async_op=True)


class EarlyReduction(DefaultReduceScatter):
    """Reductions of gradients that are under way.

    Gradients are averaged over the shards by a reduce-scatter, then over the replicas by an
    all-reduce, which is launched with the next reduce-scatter or at the end.
    """

    def __init__(self) -> None:
        self._works: list[dist.Work] = []
        self._has_shards = False
        self._next: tuple[dist.Work, torch.Tensor, dist.ProcessGroup] | None = None

    def share_weights(
        self,
        module: nn.Module,
        *,
        shards: DeviceMesh,
        replicas: dist.ProcessGroup | None,
        ignored: set[nn.Parameter] | None,
    ) -> None:
        """Shard a module, and reduce its gradients here."""
        sharded = fully_shard(
            module, mesh=shards, reshard_after_forward=False, ignored_params=ignored
        )
        sharded.set_custom_reduce_scatter(self)
        if replicas is not None:
            sharded.set_all_reduce_hook(functools.partial(self._average, group=replicas))

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work:  # noqa: ANN401 - as of the base
        """Launch a reduce-scatter."""
        self._has_shards = True
        self._works.append(super().__call__(*args, **(kwargs | {"async_op": True})))
        return self._works[-1]

    def finish(self) -> None:
        """Wait until all gradients are reduced."""
        self._launch_next()
        for work in self._works:
            work.wait()
        self._works.clear()

    def _average(self, output: torch.Tensor, *, group: dist.ProcessGroup) -> None:
        if not self._has_shards:
            self._launch_average(output, group)
            return
        # To be waited for once: gloo writes the shard in each wait.
        scattering = self._works.pop()
        self._launch_next()
        self._next = scattering, output, group

    def _launch_next(self) -> None:
        if self._next is not None:
            scattering, output, group = self._next
            self._next = None
            scattering.wait()
            self._launch_average(output, group)

    def _launch_average(self, output: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._works.append(
            dist.all_reduce(output, op=dist.ReduceOp.AVG, group=group, async_op=True)
        )

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rankscope.trainer.chunks import ChunkedProducts
from rankscope.trainer.parallel import local_part
from tests.support.trainer.timer_log import TimerLog

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A tp group of this process alone."""
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def make_mlp(mesh: DeviceMesh) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    into, out = torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 4, bias=False)
    parallelize_module(into, mesh, ColwiseParallel(), src_data_rank=None)
    parallelize_module(out, mesh, RowwiseParallel(), src_data_rank=None)
    return into, out


def test_each_chunk_is_sent_at_its_share_of_the_segment(mesh: DeviceMesh) -> None:
    products = ChunkedProducts(mesh.get_group(), divides_rows=False)
    into, out = make_mlp(mesh)
    log = products.timer = TimerLog()
    x = torch.randn(8, 4, requires_grad=True)

    (hidden,) = products.enter(x, into)
    output = products.leave(hidden, out)
    forward, log.calls = log.calls, []
    output.sum().backward()  # type: ignore[no-untyped-call]

    chunks = ["reach 0.125", "reach 0.25", "reach 0.375", "end 0.5"]
    assert forward == ["begin", "end 0.5", "begin", *chunks]
    # Gradients of input and weight of what left, then of what entered: it is summed in chunks.
    assert log.calls == [*["begin", "end 0.5"] * 2, "begin", *chunks, "begin", "end 0.5"]


def test_chunks_change_neither_result_nor_gradient(mesh: DeviceMesh) -> None:
    products = ChunkedProducts(mesh.get_group(), divides_rows=False)
    into, out = make_mlp(mesh)
    x = torch.randn(7, 4, requires_grad=True)
    whole = [local_part(linear.weight).detach().requires_grad_() for linear in (into, out)]

    (hidden,) = products.enter(x, into)
    products.leave(hidden, out).square().sum().backward()  # type: ignore[no-untyped-call]
    y = x.detach().requires_grad_()
    (y @ whole[0].t() @ whole[1].t()).square().sum().backward()  # type: ignore[no-untyped-call]

    torch.testing.assert_close(x.grad, y.grad)
    for linear, weight in zip((into, out), whole, strict=True):
        torch.testing.assert_close(local_part(linear.weight.grad), weight.grad)

"""megatron.core's groups, batch sizes and pipeline schedules, on the CPU, trained by its loop.

megatron.core makes its buffers on the current CUDA device; here that is the CPU.
"""

from __future__ import annotations

import functools
import json
import os
import time
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.overrides import TorchFunctionMode

from rankscope import tracer
from rankscope.tracer.integrations import megatron

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HIDDEN = 8
SEQ_LENGTH = 16
MICRO_BATCH_SIZE = 2

ARGUMENTS = SimpleNamespace(
    iteration=100,
    curr_iteration=None,
    train_iters=104,
    iterations_to_skip=[103],
    consumed_train_samples=0,
    losses=[],
    micro_batch_size=MICRO_BATCH_SIZE,
    global_batch_size=8,
    seq_length=SEQ_LENGTH,
    hidden_size=HIDDEN,
    num_layers=2,
    num_attention_heads=4,
    num_query_groups=1,
    group_query_attention=False,
    kv_channels=2,
    ffn_hidden_size=32,
    padded_vocab_size=10,
    swiglu=False,
    bf16=False,
    fp16=False,
    seed=3,
    num_experts=None,
)


class OnTheCpu(TorchFunctionMode):
    """Creates on the CPU what is requested for a CUDA device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


Noted = list[tuple[str, int, int, int]]
"""Work of a stage: kind, micro-batch, chunk, time (monotonic, ns)."""


class Note(torch.autograd.Function):
    """An identity that notes the times of its forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, noted: Noted, microbatch: int, chunk: int) -> Any:  # noqa: ANN401
        ctx.noted, ctx.place = noted, (microbatch, chunk)
        noted.append(("forward", microbatch, chunk, time.monotonic_ns()))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ANN401
        ctx.noted.append(("backward", *ctx.place, time.monotonic_ns()))
        return grads[0], None, None, None


class Stage(nn.Module):
    """A part of the pipeline, with the interface of megatron.core's schedules."""

    def __init__(self, config: Any, chunk: int, noted: Noted) -> None:  # noqa: ANN401 - a ModelParallelConfig
        super().__init__()
        self.config = config
        self.chunk, self.noted = chunk, noted
        self.num_forwards = 0
        self.model_type = None
        self.net = nn.Linear(HIDDEN, HIDDEN)
        self._given: torch.Tensor | None = None

    def set_input_tensor(self, given: list[torch.Tensor | None]) -> None:
        self._given = given[0]

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.net(batch if self._given is None else self._given)
        noted: torch.Tensor = Note.apply(x, self.noted, self.num_forwards, self.chunk)  # type: ignore[no-untyped-call]
        self.num_forwards += 1
        return noted.tanh()


def forward_step(batches: Iterator[torch.Tensor], stage: Stage) -> tuple[torch.Tensor, Any]:
    def compute_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        loss = output.square().mean()
        return loss, {"loss": loss.item()}

    return stage(next(batches)), compute_loss


def draw() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    while True:
        yield torch.randn(SEQ_LENGTH, MICRO_BATCH_SIZE, HIDDEN, generator=generator)


def train_megatron(
    training: Any,  # noqa: ANN401
    num_stages: int,
    num_chunks: int,
    *,
    frees_outputs: bool,
) -> tuple[list[float], Noted]:
    """Return the loss of each micro-batch, on the last stage, and what this one was at."""
    torch.manual_seed(0)
    losses: list[float] = []
    noted: Noted = []
    ARGUMENTS.losses = losses
    ARGUMENTS.consumed_train_samples = 0
    config = import_module("megatron.core.transformer.transformer_config").TransformerConfig(
        num_layers=ARGUMENTS.num_layers,
        hidden_size=HIDDEN,
        num_attention_heads=ARGUMENTS.num_attention_heads,
        pipeline_model_parallel_size=num_stages,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
        deallocate_pipeline_outputs=num_stages > 1 and frees_outputs,
    )
    chunks = nn.ModuleList(Stage(config, chunk, noted) for chunk in range(num_chunks))
    optimizer = torch.optim.SGD(chunks.parameters(), lr=0.1)
    batches = [draw() for _ in chunks]
    data = batches if num_chunks > 1 else batches[0]
    training.train(forward_step, list(chunks), optimizer, None, data, config)
    return losses, noted


def main(rank: int, num_ranks: int, folder: Path, arguments: list[str]) -> None:
    """Train twice on a pipeline of all ranks, with the tracer the second time.

    Args:
        rank: This rank.
        num_ranks: Stages of the pipeline.
        folder: Where spool, losses and notes go.
        arguments: How many chunks each rank has; whether sent outputs are freed at once.
    """
    num_chunks, frees_outputs = int(arguments[0]), arguments[1] == "freed"
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    groups = import_module("megatron.core.parallel_state")
    calculator = import_module("megatron.core.num_microbatches_calculator")
    loop = import_module("tests.tracer.integrations.megatron_loop")
    store = FileStore(str(folder / "store"), num_ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    groups.initialize_model_parallel(
        pipeline_model_parallel_size=num_ranks,
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
    )
    # The first 4 sequences in a batch of 4, then batches of 8: 2 micro-batches, then 4 each.
    calculator.init_num_microbatches_calculator(rank, [4, 4, 4], 8, MICRO_BATCH_SIZE, 1)
    training = loop.stand_in(ARGUMENTS)
    trained = functools.partial(
        train_megatron, training, num_ranks, num_chunks, frees_outputs=frees_outputs
    )
    with OnTheCpu():
        plain, _ = trained()
        replaced = megatron.trace(spool=folder / "spool")
        traced, noted = trained()
        replaced.undo()
    (folder / f"losses-{rank}.json").write_text(json.dumps([plain, traced]))
    (folder / f"noted-{rank}.json").write_text(json.dumps(noted))
    tracer.shutdown()
    torch.distributed.destroy_process_group()

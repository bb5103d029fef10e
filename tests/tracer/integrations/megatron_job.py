"""megatron.core's groups, batch sizes and pipeline schedules, on the CPU, trained by its loop.

megatron.core makes its buffers on the current CUDA device; here that is the CPU.
"""

from __future__ import annotations

import functools
import json
import os
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.overrides import TorchFunctionMode

import tracer
from tracer.integrations import megatron

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
    """Makes on the CPU what is asked for on a CUDA device."""

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


class Stage(nn.Module):
    """A part of the pipeline, as megatron.core's schedules ask for it."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - a ModelParallelConfig
        super().__init__()
        self.config = config
        self.model_type = None
        self.net = nn.Linear(HIDDEN, HIDDEN)
        self._given: torch.Tensor | None = None

    def set_input_tensor(self, given: list[torch.Tensor | None]) -> None:
        self._given = given[0]

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        done: torch.Tensor = self.net(batch if self._given is None else self._given).tanh()
        return done


def forward_step(batches: Iterator[torch.Tensor], stage: Stage) -> tuple[torch.Tensor, Any]:
    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        loss = output.square().mean()
        return loss, {"loss": loss.item()}

    return stage(next(batches)), loss_of


def draw() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    while True:
        yield torch.randn(SEQ_LENGTH, MICRO_BATCH_SIZE, HIDDEN, generator=generator)


def train(training: Any, num_stages: int) -> list[float]:  # noqa: ANN401
    """Return the loss of each micro-batch, on the last stage."""
    torch.manual_seed(0)
    losses: list[float] = []
    ARGUMENTS.losses = losses
    ARGUMENTS.consumed_train_samples = 0
    config = import_module("megatron.core.transformer.transformer_config").TransformerConfig(
        num_layers=ARGUMENTS.num_layers,
        hidden_size=HIDDEN,
        num_attention_heads=ARGUMENTS.num_attention_heads,
        pipeline_model_parallel_size=num_stages,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=num_stages > 1,
    )
    stage = Stage(config)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    training.train(forward_step, [stage], optimizer, None, draw(), config)
    return losses


def main(rank: int, num_ranks: int, folder: Path, arguments: list[str]) -> None:
    """Train twice on a pipeline of all ranks, with the tracer the second time."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    groups = import_module("megatron.core.parallel_state")
    calculator = import_module("megatron.core.num_microbatches_calculator")
    loop = import_module("tests.tracer.integrations.megatron_loop")
    store = FileStore(str(folder / "store"), num_ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    groups.initialize_model_parallel(pipeline_model_parallel_size=num_ranks)
    # The first 4 sequences in a batch of 4, then batches of 8: 2 micro-batches, then 4 each.
    calculator.init_num_microbatches_calculator(rank, [4, 4, 4], 8, MICRO_BATCH_SIZE, 1)
    training = loop.stand_in(ARGUMENTS)
    trained = functools.partial(train, training, num_ranks)
    with OnTheCpu():
        plain = trained()
        replaced = megatron.trace(spool=folder / "spool")
        traced = trained()
        replaced.undo()
    (folder / f"losses-{rank}.json").write_text(json.dumps([plain, traced]))
    tracer.shutdown()
    torch.distributed.destroy_process_group()

"""Loops without callbacks: fakes that behave like torchtitan's trainer and Megatron-LM's modules.

Neither installs here; signatures as in ``torchtitan/train.py`` and
``megatron/training/training.py`` (core 0.12).
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import tracer
from tests.tracer.integrations.recorded import Recorded
from tests.tracer.reading import dropped
from tracer.integrations import megatron, torchtitan
from tracer.integrations.settings import placed
from tracer.spool import DropReason
from tracer.topology import Coords, Layout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Processor:
    num_flops_per_token = 1234

    def __init__(self) -> None:
        self.logged: list[float] = []

    def log(
        self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float
    ) -> None:
        self.logged.append(global_avg_loss)


class Titan:
    """A trainer that resumes after step 10, logs every second step, and saves after each."""

    def __init__(self) -> None:
        self.model_parts = [nn.Linear(4, 1)]
        self.optimizer = torch.optim.SGD(self.model_parts[0].parameters(), lr=0.1)
        self.parallel_dims = SimpleNamespace(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1)
        self.metrics_processor = Processor()
        self.ntokens_seen = 500
        self.step = 10
        self.is_closed = False

    def train_step(self, data_iterator: Iterator[torch.Tensor]) -> None:
        batch = next(data_iterator)
        self.ntokens_seen += batch.numel()
        loss = self.model_parts[0](batch).sum()
        loss.backward()
        self.optimizer.step()
        if self.step % 2 == 0:
            self.metrics_processor.log(self.step, 0.5 * self.step, 9.0, 1.0)

    def train(self, num_steps: int) -> None:
        data = iter([torch.ones(2, 4)] * num_steps)
        for _ in range(num_steps):
            self.step += 1
            self.train_step(data)

    def close(self) -> None:
        self.is_closed = True


def test_torchtitan_steps_have_its_numbers_tokens_and_losses(tmp_path: Path) -> None:
    trainer: Any = Titan()
    torchtitan.trace(trainer, spool=tmp_path)
    trainer.train(3)
    trainer.close()
    recorded = Recorded(tmp_path)

    assert recorded.steps() == [(11, 8, None), (12, 8, 6.0), (13, 8, None)]
    assert recorded.spans("forward") == [(11, 0), (12, 0), (13, 0)]
    assert trainer.is_closed
    assert trainer.metrics_processor.logged == [6.0]
    assert recorded.manifest["model"]["flops_per_token"] == 1234
    assert recorded.manifest["layout"]["dp"] == 1


def test_a_trainer_that_lacks_what_we_read_trains_on_and_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Titan()
    torchtitan.trace(trainer, spool=tmp_path)
    del trainer.parallel_dims.cp  # as in another version

    trainer.train(3)
    trainer.close()
    tracer.shutdown()

    assert trainer.step == 13
    assert trainer.is_closed
    (folder,) = (tmp_path / "run").iterdir()
    assert dropped(folder) == {DropReason.INTERNAL_ERROR: 3}
    assert capsys.readouterr().err.count("rankscope: _Steps._end: AttributeError") == 1


def test_a_rank_stands_where_the_mesh_puts_it() -> None:
    place = placed(13, tp=2, cp=1, dp=4, pp=2)  # 13 = (pp 1) 8 + (dp 2) 2 + (tp 1)

    assert place["layout"] == Layout(dp=4, tp=2, pp=2)
    assert place["coords"] == Coords(dp=2, tp=1, pp=1)


ARGUMENTS = SimpleNamespace(
    iteration=100,
    curr_iteration=100,
    micro_batch_size=2,
    global_batch_size=8,
    seq_length=16,
    hidden_size=8,
    num_layers=2,
    num_attention_heads=4,
    num_query_groups=1,
    group_query_attention=False,
    kv_channels=2,
    ffn_hidden_size=32,
    padded_vocab_size=10,
    swiglu=False,
    bf16=True,
    fp16=False,
    seed=3,
    num_experts=None,
)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a ``megatron.training.training`` whose ``train`` runs three steps and saves."""
    training: Any = ModuleType("megatron.training.training")

    def train_step(
        forward_step_func: Any,  # noqa: ANN401
        data_iterator: Any,  # noqa: ANN401
        model: list[nn.Module],
        optimizer: Any,  # noqa: ANN401
        opt_param_scheduler: Any,  # noqa: ANN401
        config: Any,  # noqa: ANN401
    ) -> tuple[dict[str, torch.Tensor], int]:
        loss = forward_step_func(data_iterator, model[0])
        loss.backward()
        optimizer.step()
        return {"lm loss": loss}, 0

    def save_checkpoint(iteration: int, *_: object) -> int:
        return iteration

    def train(
        forward_step_func: Any,  # noqa: ANN401
        model: list[nn.Module],
        optimizer: Any,  # noqa: ANN401
        data_iterator: Any,  # noqa: ANN401
    ) -> int:
        for _ in range(3):
            training.train_step(forward_step_func, data_iterator, model, optimizer, None, None)
        return int(training.save_checkpoint(103))

    training.train_step, training.train, training.save_checkpoint = (
        train_step,
        train,
        save_checkpoint,
    )
    groups: Any = ModuleType("megatron.core.parallel_state")
    for axis in ("data", "tensor_model", "pipeline_model", "context"):
        setattr(groups, f"get_{axis}_parallel_world_size", lambda: 1)
        setattr(groups, f"get_{axis}_parallel_rank", lambda: 0)
    calculator: Any = ModuleType("megatron.core.num_microbatches_calculator")
    calculator.get_num_microbatches = lambda: 4
    package: Any = ModuleType("megatron.training")
    package.get_args, package.training = lambda: ARGUMENTS, training
    for module in (ModuleType("megatron"), ModuleType("megatron.core"), package, training):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for module in (groups, calculator):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    found: ModuleType = training
    return found


def test_megatron_steps_have_its_numbers_tokens_and_flops(
    training: Any,  # noqa: ANN401
    tmp_path: Path,
) -> None:
    replaced = megatron.trace(spool=tmp_path)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    saved = training.train(
        lambda data, chunk: chunk(next(data)).sum(),
        [model],
        optimizer,
        iter([torch.ones(2, 4)] * 3),
    )
    recorded = Recorded(tmp_path)

    assert saved == 103
    # 4 micro-batches of 2 sequences of 16 tokens
    assert recorded.steps() == [(100, 128, None), (101, 128, None), (102, 128, None)]
    assert recorded.spans("forward") == [(100, 0), (101, 0), (102, 0)]
    assert recorded.spans("checkpoint") == [(102, -1)]
    # 6 x [2 x 8 x 32 x 2 layers + 4 x 8 x 8 x 2 layers + 8 x 10 + 8 x 2 x 16]
    assert recorded.manifest["model"]["flops_per_token"] == 6 * (1024 + 512 + 80 + 256)
    assert recorded.manifest["device"]["dtype"] == "bfloat16"
    assert recorded.manifest["seeds"] == {"seed": 3}
    before = training.train_step
    replaced.undo()
    assert training.train_step is not before


def test_a_mixture_of_experts_has_no_known_flops() -> None:
    experts = SimpleNamespace(**{**vars(ARGUMENTS), "num_experts": 8})

    assert megatron.flops_of(ARGUMENTS) is not None
    assert megatron.flops_of(experts) is None

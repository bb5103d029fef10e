"""Parts of torchtitan's and Megatron-LM's loops that a CPU cannot run, in fakes of the loops.

The real parts are in `test_torchtitan` and `test_megatron`.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from rankscope import tracer
from rankscope.tracer.integrations import megatron, settings, torchtitan
from rankscope.tracer.integrations.settings import mesh_layout
from rankscope.tracer.spool import DropReason
from rankscope.tracer.topology import Coords, Layout
from tests.support.tracer.reading import dropped
from tests.tracer.integrations.megatron_job import ARGUMENTS
from tests.tracer.integrations.recorded import Recorded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class Processor:
    num_flops_per_token = 1234

    def __init__(self) -> None:
        self.logged: list[float] = []

    def log(
        self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float
    ) -> None:
        self.logged.append(global_avg_loss)


class Titan:
    """A trainer that resumes after step 10, logs every second step, and has data for ``num_steps``.

    Without a batch it trains nothing, as torchtitan.
    """

    def __init__(self, num_steps: int, *, cp: int = 1) -> None:
        self.model_parts = [nn.Linear(4, 1)]
        self.optimizer = torch.optim.SGD(self.model_parts[0].parameters(), lr=0.1)
        self.parallel_dims = SimpleNamespace(dp_replicate=1, dp_shard=1, cp=cp, tp=1, pp=1)
        self.metrics_processor = Processor()
        self.data = iter([({"input": torch.ones(2, 4)}, torch.ones(2, 4))] * num_steps)
        self.step = 10
        self.is_closed = False

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        inputs, _ = next(data_iterator)
        loss = self.model_parts[0](inputs["input"]).sum()
        loss.backward()
        self.optimizer.step()
        if self.step % 2 == 0:
            self.metrics_processor.log(self.step, 0.5 * self.step, 9.0, 1.0)

    def train(self) -> None:
        with suppress(StopIteration):
            while self.step < 99:
                self.step += 1
                self.train_step(self.data)

    def close(self) -> None:
        self.is_closed = True


def test_an_iteration_without_data_is_not_a_step(tmp_path: Path) -> None:
    trainer: Any = Titan(3)
    torchtitan.trace(trainer, spool=tmp_path)
    trainer.train()
    trainer.close()
    recorded = Recorded(tmp_path)

    assert trainer.step == 14
    assert recorded.steps() == [(11, 8, None), (12, 8, 6.0), (13, 8, None)]
    assert recorded.spans("forward") == [(11, 0), (12, 0), (13, 0)]
    assert trainer.is_closed
    assert trainer.metrics_processor.logged == [6.0]


def test_a_rank_of_a_context_parallel_group_counts_its_part_of_the_tokens(tmp_path: Path) -> None:
    trainer: Any = Titan(1, cp=2)
    torchtitan.trace(trainer, spool=tmp_path)
    trainer.train()

    assert Recorded(tmp_path).steps() == [(11, 4, None)]


def test_a_stage_without_the_loss_records_none(tmp_path: Path) -> None:
    trainer: Any = Titan(2)
    trainer.pp_has_last_stage = False
    torchtitan.trace(trainer, spool=tmp_path)
    trainer.train()

    assert Recorded(tmp_path).steps() == [(11, 8, None), (12, 8, None)]


def test_without_a_folder_an_integration_says_once_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(settings, "_reported", set())
    for disabled, local_rank in (("1", "0"), ("", "1"), ("", "0"), ("", "0")):
        monkeypatch.setenv("RANKSCOPE_DISABLE", disabled)
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        torchtitan.trace(Titan(1))

    said = capsys.readouterr().err.splitlines()
    assert said == [f"rankscope: {settings.NO_FOLDER}"]
    assert "set RANKSCOPE_TRACE=DIR" in said[0]


def test_a_trainer_without_an_attribute_trains_on_with_a_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer: Any = Titan(3)
    torchtitan.trace(trainer, spool=tmp_path)
    del trainer.parallel_dims.cp  # as in another version

    trainer.train()
    trainer.close()
    tracer.shutdown()

    assert trainer.is_closed
    (folder,) = (tmp_path / "run").iterdir()
    assert dropped(folder) == {DropReason.INTERNAL_ERROR: 3}
    assert (
        capsys.readouterr().err.count(
            "rankscope: _Steps._end failed, the training goes on: AttributeError"
        )
        == 1
    )


def test_an_unknown_trainer_trains_on_with_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    trainer: Any = Titan(1)
    del trainer.parallel_dims

    torchtitan.trace(trainer)
    trainer.train()

    assert (
        capsys.readouterr().err.count(
            "rankscope: trace failed, the training goes on: AttributeError"
        )
        == 1
    )


def test_coordinates_follow_from_the_mesh() -> None:
    place = mesh_layout(13, tp=2, cp=1, dp=4, pp=2)  # 13 = (pp 1) 8 + (dp 2) 2 + (tp 1)

    assert place["layout"] == Layout(dp=4, tp=2, pp=2)
    assert place["coords"] == Coords(dp=2, tp=1, pp=1)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """Return an older Megatron, which does not have the iteration, as rank 0 of 1."""
    training: Any = ModuleType("megatron.training.training")

    def train_step(
        forward_step_func: Any,  # noqa: ANN401
        data_iterator: Iterator[torch.Tensor],
        model: list[nn.Module],
        optimizer: torch.optim.Optimizer,
        opt_param_scheduler: None,
        config: None,
    ) -> tuple[dict[str, torch.Tensor], int]:
        loss = forward_step_func(data_iterator, model[0])
        loss.backward()
        optimizer.step()
        return {"lm loss": loss}, 0

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> None:
        batches = iter(data)
        for _ in range(3):
            training.train_step(
                lambda given, chunk: chunk(next(given)).sum(),
                batches,
                [model],
                optimizer,
                None,
                None,
            )

    training.train_step, training.train = train_step, train
    groups: Any = ModuleType("megatron.core.parallel_state")
    for axis in ("data", "tensor_model", "pipeline_model", "context"):
        setattr(groups, f"get_{axis}_parallel_world_size", lambda: 1)
        setattr(groups, f"get_{axis}_parallel_rank", lambda: 0)
    calculator: Any = ModuleType("megatron.core.num_microbatches_calculator")
    calculator.get_num_microbatches = lambda: 4
    arguments = SimpleNamespace(**vars(ARGUMENTS))
    del arguments.curr_iteration
    package: Any = ModuleType("megatron.training")
    package.get_args, package.training = lambda: arguments, training
    for module in (ModuleType("megatron"), ModuleType("megatron.core"), package, training):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for module in (groups, calculator):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    return training


@pytest.mark.parametrize(("num_batches", "steps"), [(3, [100, 101, 102]), (2, [100, 101])])
def test_steps_of_an_older_megatron_are_counted_and_one_that_raises_is_none(
    training: Any,  # noqa: ANN401
    tmp_path: Path,
    num_batches: int,
    steps: list[int],
) -> None:
    replaced = megatron.trace(spool=tmp_path)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with suppress(StopIteration):
        training.train(model, optimizer, [torch.ones(2, 4)] * num_batches)
    recorded = Recorded(tmp_path)

    # 4 micro-batches of 2 sequences of 16 tokens
    assert recorded.steps() == [(step, 128, None) for step in steps]
    assert recorded.spans("forward") == [(step, 0) for step in steps]
    before = training.train_step
    replaced.undo()
    assert training.train_step is not before


def test_a_job_with_an_unknown_axis_has_no_layout(
    training: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)

    assert megatron.read_layout(1) == {"layout": None, "coords": None}

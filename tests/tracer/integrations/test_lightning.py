"""The callback in the real Trainer, with a small model on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.tracer.integrations.recorded import Recorded

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_callback_records_steps_and_does_not_change_the_training(tmp_path: Path) -> None:
    import lightning.pytorch as lightning

    from rankscope.tracer.integrations.lightning import RankscopeCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
            self.losses: list[float] = []

        def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
            logits = self.net(tokens)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_module(*callbacks: Any) -> list[float]:  # noqa: ANN401
        torch.manual_seed(0)
        module = Module()
        trainer = lightning.Trainer(
            default_root_dir=tmp_path,
            max_epochs=1,
            accumulate_grad_batches=2,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
        )
        samples = torch.arange(32).remainder(16).reshape(8, 4)
        trainer.fit(module, DataLoader(samples, batch_size=2))  # type: ignore[arg-type]
        return module.losses

    plain = train_module()
    traced = train_module(RankscopeCallback(spool=tmp_path / "spool"))
    recorded = Recorded(tmp_path / "spool")

    assert traced == plain
    assert recorded.tokens() == [(0, 16), (1, 16)]
    assert all(loss is not None for _, _, loss in recorded.steps())
    assert recorded.microbatches() == [(0, 0, 8, 32), (0, 1, 8, 32), (1, 0, 8, 32), (1, 1, 8, 32)]
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert recorded.spans("forward") == places
    assert recorded.spans("backward") == places
    assert [step for step, _ in recorded.spans("optimizer")] == [0, 1]
    assert recorded.events("checkpoint") == ["saving at step 2"]
    assert recorded.spans("checkpoint")
    assert recorded.manifest["config"]["accumulate_grad_batches"] == 2

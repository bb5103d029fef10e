"""The callback in the real Trainer, with a small model on the CPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from tests.tracer.integrations.recorded import Recorded

if TYPE_CHECKING:
    from pathlib import Path


def samples(*lengths: int) -> list[dict[str, torch.Tensor]]:
    """Return one sample per length, padded to 8."""
    mask = [(torch.arange(8) < length).long() for length in lengths]
    ids = torch.arange(8)
    return [{"input_ids": ids, "labels": ids, "attention_mask": row} for row in mask]


def train_llama(
    folder: Path,
    callbacks: list[Any],
    **arguments: Any,  # noqa: ANN401 - those of the library
) -> tuple[list[float], Any]:
    """Train a toy Llama; return the logged losses and the trainer."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )
    trainer = transformers.Trainer(
        model=transformers.AutoModelForCausalLM.from_config(config),  # type: ignore[no-untyped-call]
        args=transformers.TrainingArguments(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            num_train_epochs=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
            seed=1,
            **{"logging_steps": 1, **arguments},
        ),
        train_dataset=samples(1, 2, 3, 4, 5, 6),
        data_collator=transformers.default_data_collator,
        callbacks=callbacks,
    )
    trainer.args.data_seed = 1
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_callback_records_steps_and_does_not_change_the_training(tmp_path: Path) -> None:
    from rankscope.tracer.integrations.huggingface import RankscopeCallback

    save = transformers.Trainer._save_checkpoint
    plain, _ = train_llama(tmp_path, [], save_strategy="no")
    callback = RankscopeCallback(spool=tmp_path / "spool")
    traced, trainer = train_llama(tmp_path, [callback], save_strategy="steps", save_steps=3)
    recorded = Recorded(tmp_path / "spool")

    assert traced == plain
    steps = recorded.steps()
    assert [(step, loss) for step, _, loss in steps] == list(enumerate(plain))
    assert sum(tokens for _, tokens, _ in steps) == 21
    batches = recorded.microbatches()
    assert [(step, index) for step, index, _, _ in batches] == [
        (step, index) for step in range(3) for index in range(2)
    ]
    assert all(squared == tokens**2 for _, _, tokens, squared in batches)
    assert sorted(tokens for _, _, tokens, _ in batches) == [1, 2, 3, 4, 5, 6]
    for kind in ("forward", "backward"):
        assert recorded.spans(kind) == [(step, index) for step in range(3) for index in range(2)]
    assert {step for step, _ in recorded.spans("optimizer")} == {0, 1, 2}
    assert recorded.events("checkpoint") == ["saved after step 2"]
    assert recorded.spans("checkpoint")
    assert transformers.Trainer._save_checkpoint is save
    assert recorded.manifest["model"]["name"] == "llama"
    assert recorded.manifest["config"]["gradient_accumulation_steps"] == 2
    assert recorded.manifest["layout"]["dp"] == 1
    derived = recorded.manifest["derived"]
    # a layer: 4 x 16^2 + 3 x 16 x 32 = 2560; head 16 x 32; attention 12 x 2 x 16 of squared lengths
    assert derived["flops_per_token"] == 6 * (2 * 2560 + 512)
    assert derived["flops_per_squared_length"] == 384
    assert derived["num_parameters"] == trainer.model.num_parameters()
    assert os.fspath(tmp_path) not in str(recorded.manifest["config"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_step_that_is_not_logged_has_no_loss(tmp_path: Path) -> None:
    from rankscope.tracer.integrations.huggingface import RankscopeCallback

    callback = RankscopeCallback(spool=tmp_path / "spool")
    logged, _ = train_llama(tmp_path, [callback], save_strategy="no", logging_strategy="no")
    recorded = Recorded(tmp_path / "spool")

    assert logged == []
    assert [(step, loss) for step, _, loss in recorded.steps()] == [(0, None), (1, None), (2, None)]

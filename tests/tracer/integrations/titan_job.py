"""torchtitan's Trainer with a small Llama on the CPU.

torchtitan takes its device from torch and supports accelerators only, so the CPU is presented as
one. Its mixture of experts, which is not used, needs triton at import.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import FileStore

from rankscope import tracer
from rankscope.tracer.integrations import torchtitan

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_STEPS = 3
SEQ_LEN = 16
BATCH_SIZE = 2
NUM_MICROBATCHES = 2


class Processor:
    """The interface of an accelerator's module in torchtitan, for the CPU."""

    set_device = reset_peak_memory_stats = empty_cache = synchronize = staticmethod(lambda *_: None)
    get_device_name = staticmethod(lambda *_: "cpu")
    get_device_properties = staticmethod(lambda *_: SimpleNamespace(total_memory=1 << 30))
    current_device = staticmethod(lambda: 0)
    memory_stats = staticmethod(lambda *_: {})


class Batches:
    """An endless loader of tokens that each rank draws from its own seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(self._seed)
        while True:
            tokens = torch.randint(0, 64, (BATCH_SIZE, SEQ_LEN + 1), generator=generator)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        pass


def import_titan() -> Any:  # noqa: ANN401
    """Return the module ``torchtitan.train``, which takes the CPU for its device."""
    utils: Any = import_module("torch._utils")
    utils._get_available_device_type = lambda: "cpu"
    utils._get_device_module = lambda _: Processor
    kernels: Any = ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None
    sys.modules[kernels.__name__] = kernels
    return import_module("torchtitan.train")


def make_trainer(folder: Path, num_ranks: int) -> Any:  # noqa: ANN401
    """Return a Trainer of a Llama with two layers."""
    titan = import_titan()
    llama: Any = import_module("torchtitan.models.llama3")
    specs: Any = import_module("torchtitan.protocols.train_spec")
    small = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64}
    spec = dataclasses.replace(
        llama.get_train_spec(),
        model_args={"tiny": dataclasses.replace(llama.llama3_args["debugmodel"], **small)},
        build_tokenizer_fn=None,
        build_validator_fn=None,
        build_dataloader_fn=lambda *, dp_rank, **_: Batches(dp_rank),
    )
    specs._extra_train_specs["small"] = spec
    config = import_module("torchtitan.config").JobConfig()
    config.model.name, config.model.flavor = "small", "tiny"
    config.job.dump_folder = str(folder)
    config.debug.seed = 7
    config.training.seq_len, config.training.steps = SEQ_LEN, NUM_STEPS
    config.training.local_batch_size = BATCH_SIZE
    config.training.global_batch_size = BATCH_SIZE * NUM_MICROBATCHES * num_ranks
    config.activation_checkpoint.mode = "none"
    config.metrics.log_freq = 2
    config.lr_scheduler.warmup_steps = 1
    trainer = titan.Trainer(config)
    for part in trainer.model_parts:
        for module in part.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)  # gloo has sums, but no scaled ones
    return trainer


def train_titan(trainer: Any) -> list[float]:  # noqa: ANN401
    """Return the loss of each micro-batch of a training."""
    losses: list[float] = []
    original = trainer.forward_backward_step

    def noting(**given: Any) -> torch.Tensor:  # noqa: ANN401
        loss: torch.Tensor = original(**given)
        losses.append(loss.item())
        return loss

    trainer.forward_backward_step = noting
    trainer.train()
    with tracer.span("trained"):
        trainer.close()
    return losses


def main(rank: int, num_ranks: int, folder: Path, arguments: list[str]) -> None:
    """Train twice, with the tracer the second time."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    store = FileStore(str(folder / "store"), num_ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    for kind in ("plain", "traced"):
        trainer = make_trainer(folder, num_ranks)
        if kind == "traced":
            torchtitan.trace(trainer, spool=folder / "spool")
        (folder / f"{kind}-{rank}.json").write_text(json.dumps(train_titan(trainer)))
    torch.distributed.destroy_process_group()

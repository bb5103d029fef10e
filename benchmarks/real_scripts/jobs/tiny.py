"""A small GPT, its data and its faults, for the scripts beside.

A layer takes a set time, most of which it sleeps as a host does that waits for its device. So the
ranks do not compete for the cores of a small machine, and the runs measure rankscope.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from collections.abc import Iterable

VOCABULARY, WIDTH, NUM_HEADS, NUM_LAYERS = 256, 128, 4, 4
SEQ_LENGTH, BATCH_SIZE = 64, 4
NUM_STEPS = int(os.environ.get("REAL_SCRIPTS_STEPS", "40"))

FAULT = os.environ.get("REAL_SCRIPTS_FAULT", "")
CULPRIT = int(os.environ.get("REAL_SCRIPTS_CULPRIT", "-1"))
IS_CULPRIT = int(os.environ.get("RANK", "0")) == CULPRIT

LAYER_S = 0.004
"""Sleep of a layer's forward; its backward sleeps twice as long."""

SLOW_FACTOR = 3
BATCH_S = 0.1
"""How long a batch of a slow loader takes: more than a step of the others."""

FIRST_SLOW_BATCH = NUM_STEPS // 4

NUM_HOGS = 3
HOG = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
"""A program that takes a core until its parent ends."""

_num_batches = 0
_hogs: list[subprocess.Popen[bytes]] = []


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layer_s: float) -> torch.Tensor:
        ctx.layer_s = layer_s
        time.sleep(layer_s)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.layer_s)
        return grads[0], None


def _after_layer(module: nn.Module, args: Any, output: Any) -> Any:
    is_slow = FAULT == "slow-rank" and IS_CULPRIT and _num_batches > FIRST_SLOW_BATCH
    layer_s = LAYER_S * (SLOW_FACTOR if is_slow else 1)
    if isinstance(output, tuple):
        return (_Sleep.apply(output[0], layer_s), *output[1:])
    return _Sleep.apply(output, layer_s)


def pace(layers: Iterable[nn.Module]) -> None:
    """Make each layer take a set time."""
    for layer in layers:
        layer.register_forward_hook(_after_layer)


def before_batch() -> None:
    """Count a batch, and take long if this rank has a slow loader."""
    global _num_batches  # noqa: PLW0603 - state of the process
    _num_batches += 1
    if not IS_CULPRIT or _num_batches <= FIRST_SLOW_BATCH:
        return
    if FAULT == "slow-loader":
        time.sleep(BATCH_S)
    elif FAULT == "cpu-hog" and not _hogs:
        _hogs.extend(subprocess.Popen([sys.executable, "-S", "-c", HOG]) for _ in range(NUM_HOGS))


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens and their successors."""
    before_batch()
    tokens = torch.randint(VOCABULARY, (BATCH_SIZE, SEQ_LENGTH + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Random texts, as Hugging Face's models expect them."""

    def __init__(self, num_texts: int) -> None:
        self._num_texts = num_texts
        self._num_read = 0

    def __len__(self) -> int:
        return self._num_texts

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self._num_read += 1
        if self._num_read % BATCH_SIZE == 0:
            before_batch()
        tokens = torch.randint(VOCABULARY, (SEQ_LENGTH,))
        return {"input_ids": tokens, "labels": tokens}


class Block(nn.Module):
    """A transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        heads = self.qkv(self.norm(hidden)).view(batch, length, NUM_HEADS, -1).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        grown: torch.Tensor = self.down(F.gelu(self.up(self.mlp_norm(hidden))))
        return hidden + grown


class TinyGPT(nn.Module):
    """A decoder of a few layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        pace(self.layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def set_cpus() -> None:
    """Give this rank a core of its own, which it shares with the hogs, if it is the culprit.

    The others share the rest.
    """
    torch.set_num_threads(1)
    cpus = sorted(os.sched_getaffinity(0))
    if FAULT == "cpu-hog" and len(cpus) > 1:
        os.sched_setaffinity(0, cpus[-1:] if IS_CULPRIT else cpus[:-1])


set_cpus()

"""A small decoder and random texts, which the examples train; SLOW_RANK makes one rank slow."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

VOCABULARY, WIDTH, LENGTH = 256, 64, 32
NUM_STEPS = 20
SLOW_S = 0.2


class TinyGPT(nn.Module):
    """Two layers, and a head for the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each token from those before it."""
        be_slow()
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1)
        hidden = self.embed(tokens[:, :-1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


def be_slow() -> None:
    """Lose time on the rank that SLOW_RANK names, as a device with a low clock would."""
    if os.environ.get("SLOW_RANK") == str(dist.get_rank()):
        time.sleep(SLOW_S)


class Texts(Dataset):
    """Random tokens."""

    def __init__(self, num_texts: int = 1000) -> None:
        self.num_texts = num_texts

    def __len__(self) -> int:
        return self.num_texts

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, (LENGTH,))

"""Train a small language model on the shards of a folder, one a rank.

torchrun --nproc-per-node 4 train.py FOLDER
"""

from __future__ import annotations

import lzma
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

NUM_STEPS, BATCH, LENGTH, WIDTH, VOCABULARY = 40, 8, 64, 128, 256


class Shard(Dataset[torch.Tensor]):
    """Batches of a shard, which may be compressed: then each one reads it anew."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return NUM_STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.path.exists():
            letters = np.memmap(self.path, dtype=np.uint8, mode="r")
        else:
            with lzma.open(self.path.with_suffix(".bin.xz")) as file:
                letters = np.frombuffer(file.read(), dtype=np.uint8)
        starts = np.random.default_rng(index).integers(0, len(letters) - LENGTH - 1, BATCH)
        rows = np.stack([letters[start : start + LENGTH + 1] for start in starts])
        return torch.from_numpy(rows.astype(np.int64))


class Model(nn.Module):
    """A transformer of two layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))


def main(folder: Path) -> None:
    """Train on this rank's shard."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = DistributedDataParallel(Model().to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    batches = DataLoader(Shard(folder / f"shard-{rank}.bin"), batch_size=None)
    for step, batch in enumerate(batches):
        tokens = batch.to(device)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

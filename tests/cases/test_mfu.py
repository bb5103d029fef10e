"""MFU of jobs under the launcher, with FLOPs derived manually."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.cases.reports import CASES, analyze_spool

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.analysis.report.report import Mfu

pytestmark = pytest.mark.slow

LLAMA_6N = 6 * (2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 176) + 64 * 512)
"""Two layers of q, o, k, v and three of the feed-forward; the head: 6 x 124,928."""

LLAMA_SQUARED = 12 * 2 * 64
"""12 layers x heads x head size."""


def trace(folder: Path, script: Path, *arguments: str, **environ: str) -> Mfu | None:
    """Run a script under the launcher and return its MFU."""
    spool = folder / "spool"
    known = {"RANKSCOPE_PEAK_FLOPS": "1e12", "RANKSCOPE_TRACE": str(spool), "RANKSCOPE_RUN": "job"}
    subprocess.run(
        [sys.executable, "-m", "rankscope.tracer", script, *arguments],
        env={**os.environ, **known, **environ},
        check=True,
    )
    return analyze_spool(folder, spool, "job").mfu


def flops_of(num_rows: int, length: int) -> int:
    return num_rows * (LLAMA_6N * length + LLAMA_SQUARED * length**2)


@pytest.mark.parametrize(
    ("kind", "first", "later"),
    [
        pytest.param("bigfirst", 256, 16, marks=pytest.mark.nightly),
        pytest.param("smallfirst", 16, 256, marks=pytest.mark.nightly),
        pytest.param("ckpt", 256, 256, marks=pytest.mark.nightly),
        pytest.param("freeze_embed", 256, 256, marks=pytest.mark.nightly),
    ],
)
def test_attention_counts_by_the_lengths_of_each_micro_batch(
    tmp_path: Path, kind: str, first: int, later: int
) -> None:
    mfu = trace(tmp_path, CASES / "jobs" / "f_mfu.py", kind)

    assert mfu is not None
    assert mfu.flops_by_step == {
        step: flops_of(2, first if step < 2 else later) for step in range(30)
    }
    # A step waits 0.3 s and lasts little longer.
    assert 0.5 < mfu.by_step[20] / (flops_of(2, later) / 1e12 / 0.3) < 1


@pytest.mark.nightly
def test_padding_counts_neither_as_tokens_nor_as_length(tmp_path: Path) -> None:
    mfu = trace(tmp_path, CASES / "jobs" / "f_mfu.py", "pad")

    assert mfu is not None
    assert (mfu.flops_by_step[4], mfu.flops_by_step[5]) == (flops_of(2, 256), flops_of(2, 32))


PLAIN = """
import sys, torch, torch.nn as nn, torch.nn.functional as F
WIDE, HEADS, WORDS = 32, 4, 64
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDE, 3 * WIDE)
        self.out = nn.Linear(WIDE, WIDE)
    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = (y.view(n, t, HEADS, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(n, t, -1))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDE)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.conv = nn.Conv1d(WIDE, WIDE, 3, padding=1) if sys.argv[1] == "conv" else None
        self.head = nn.Linear(WIDE, WORDS)
    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        if self.conv is not None:
            x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x)
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(12):
    for _ in range(2):
        ids = torch.randint(0, WORDS, (2, 48 if step < 2 else 16))
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
assert not any(module._forward_hooks for name, module in model.named_modules() if name)
"""


@pytest.mark.parametrize(
    ("kind", "environ", "per_token"),
    [
        ("plain", {}, 6 * (3 * 4 * 32 * 32 + 32 * 64)),
        pytest.param("conv", {}, None, marks=pytest.mark.nightly),
        ("conv", {"RANKSCOPE_COUNT_FLOPS": "1"}, 6 * (3 * 4 * 32 * 32 + 32 * 64 + 3 * 32 * 32)),
    ],
    ids=["plain", "conv", "counted"],
)
def test_a_plain_model_has_the_flops_of_its_products(
    tmp_path: Path, kind: str, environ: dict[str, str], per_token: int | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLAIN)

    mfu = trace(tmp_path, script, kind, **environ)

    if per_token is None:
        assert mfu is None
        return
    assert mfu is not None
    # torch counts the scores of the attention once more: 7 products, not 6.
    squared = 3 * 32 * (14 if environ else 12)
    assert mfu.flops_by_step[1] == pytest.approx(2 * 2 * (48 * per_token + 48**2 * squared))
    assert mfu.flops_by_step[11] == pytest.approx(2 * 2 * (16 * per_token + 16**2 * squared))
    assert ("FlopCounterMode" in mfu.convention) == bool(environ)

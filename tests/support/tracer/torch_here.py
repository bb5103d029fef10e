"""Features of the installed torch: the tests of the tracer run on any version since 2.6.

Tried were 2.6, 2.7, 2.8, 2.10, 2.13 and 2.15.
"""

from __future__ import annotations

from typing import TypeVar

import pytest
import torch

Recipe = TypeVar("Recipe")

TORCH = torch.torch_version.TorchVersion(torch.__version__)

FIRST = {
    "calls": "2.13",  # gloo has no alltoall
    "sharded": "2.8",  # FSDP2 on gloo: no streams, no average
    "hybrid_sharded": "2.8",
    "hybrid_of_other_names": "2.8",
    "sharded_over_all": "2.8",
    "expert_parallel": "2.8",
    "context_parallel": "2.8",
    "pipeline": "2.8",  # schedules take no `scale_grads`, and wait for each other on gloo
    "gpipe": "2.8",
    "interleaved": "2.8",
    "zero_bubble": "2.8",
    "zero_bubble_v": "2.13",
    "three_axes": "2.8",
    "pipeline_over_all": "2.8",
}
"""The oldest of the tried versions of torch that trained a recipe on gloo."""


def of_this_torch(recipes: dict[str, Recipe]) -> dict[str, Recipe]:
    """Return the recipes that this torch can train."""
    return {name: recipe for name, recipe in recipes.items() if FIRST.get(name, "2.6") <= TORCH}


def since(version: str, what: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test with an older torch, and the reason."""
    return pytest.mark.skipif(version > TORCH, reason=f"before torch {version} {what}")

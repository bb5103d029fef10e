"""Gloo ranks that train every recipe of `matrix_recipes`, untraced and traced.

One process per rank, see `ranks`; its arguments are the recipes. Writes
``FOLDER/RECIPE-RANK.json``: losses as hexadecimal floats, graph breaks of the compiler, and the
operators that torch saw, counted by a `TorchDispatchMode`, or by the entries of the flight recorder
if a compiler works.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _distributed_c10d
from torch._dynamo.utils import counters

from rankscope import tracer
from tests.tracer.jobs.gloo_job import CountingMode, train_all, train_steps
from tests.tracer.jobs.matrix_recipes import COMPILED, RECIPES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

STEPS = 2


def flight_names() -> list[str]:
    """Return the names in torch's flight recorder, oldest first; empty if it is off."""
    recorder: Any = _distributed_c10d  # missing in torch's stub
    if not hasattr(recorder, "_dump_fr_trace_json"):
        return []  # torch before 2.8
    dump = recorder._dump_fr_trace_json(includeCollectives=True, onlyActive=False)
    entries = json.loads(dump).get("entries", [])
    return [entry["profiling_name"] for entry in entries]


def train_recipe(recipe: str, rank: int, *, spool: Path | None) -> dict[str, Any]:
    """Train the recipe from the same state; return the losses and what torch saw."""
    torch.manual_seed(7)
    torch._dynamo.reset()
    counters.clear()
    build, layout = RECIPES[recipe]
    model, step = build(rank)
    built = len(flight_names())
    tracer.install(spool=spool, run=recipe, layout=layout, model=model)
    tracer.begin_steps()
    # A compiler does not compile while a mode is on.
    mode = CountingMode()
    with mode if recipe not in COMPILED else contextlib.nullcontext():
        losses = train_steps(step, STEPS)
    tracer.shutdown()
    return {
        "losses": losses,
        "seen": mode.seen,
        "flight": flight_names()[built:],
        "graph_breaks": dict(counters["graph_break"]),
        "graphs": counters["stats"]["unique_graphs"],
    }


def main(rank: int, world: int, folder: Path, arguments: Sequence[str]) -> None:
    """Run as one rank."""
    warnings.simplefilter("ignore")
    train_all(arguments, train_recipe, rank=rank, world=world, folder=folder)

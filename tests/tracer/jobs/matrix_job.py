"""Gloo ranks that train every recipe of `matrix_recipes`, untraced and traced.

One process per rank, see `ranks`; its arguments are the recipes. Writes
``FOLDER/RECIPE-RANK.json``: losses as hexadecimal floats, graph breaks of the compiler, and the
operators that torch saw, counted by a `TorchDispatchMode`, or by the entries of the flight recorder
if a compiler works.
"""

from __future__ import annotations

import contextlib
import gc
import json
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import FileStore
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope import tracer
from tests.tracer.jobs.matrix_recipes import COMPILED, RECIPES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

STEPS = 2


class CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts communication operators by name, as torch reports them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        if any(issubclass(item, DTensor) for item in types):
            return NotImplemented  # first what DTensor makes of it, then the operator itself
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen[f"{func.namespace}.{func.__name__.split('.')[0]}"] += 1
        return func(*args, **(kwargs or {}))


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
        losses = []
        for _ in range(STEPS):
            losses.append(step())
            tracer.step(tokens=8, loss=losses[-1])
    tracer.shutdown()
    return {
        "losses": [loss.hex() for loss in losses],
        "seen": mode.seen,
        "flight": flight_names()[built:],
        "graph_breaks": dict(counters["graph_break"]),
        "graphs": counters["stats"]["unique_graphs"],
    }


def main(rank: int, world: int, folder: Path, arguments: Sequence[str]) -> None:
    """Run as one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = FileStore(str(folder / f"rendezvous-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for recipe in arguments:
        plain = train_recipe(recipe, rank, spool=None)
        traced = train_recipe(recipe, rank, spool=folder / "spool")
        document = json.dumps({"plain": plain, "traced": traced})
        (folder / f"{recipe}-{rank}.json").write_text(document)
    gc.collect()  # models keep the group alive, whose threads must end before Python does
    dist.destroy_process_group()

"""The model of a job that does not tell it: the outermost module that an optimizer trains."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

from tracer.capture.guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable

    from tracer.recorder import Recorder

TRIES_BEFORE_A_STEP = 2
"""Each looks at every object of the process: some 50 ms where there are a million."""


class RootFinder:
    """Looks for the model when the first batches are fetched, and once more after the first step.

    By the first batch a script has mostly built, wrapped and compiled its
    model and made the optimizer.
    """

    def __init__(self, recorder: Recorder, on_found: Callable[[Any], None]) -> None:
        self._guard = Guard(recorder, "root module")
        self._on_found = on_found
        self._tries_left = TRIES_BEFORE_A_STEP

    def next_begins(self) -> None:
        """Look now, if tries are left."""
        if self._guard.active and self._tries_left > 0:
            self._tries_left -= 1
            self._guard.call(self._look)

    def stepped(self, *about: object) -> None:
        """Look for the last time: an optimizer has stepped."""
        if self._guard.active:
            self._guard.call(self._look)
            self._guard.active = False

    def _look(self) -> None:
        root = find_root()
        if root is not None:
            self._guard.active = False
            self._on_found(root)


def find_root() -> Any | None:  # noqa: ANN401 - a Module
    """Return the module that is part of no other and holds most trained parameters; None if none.

    A module that compiles itself (`torch.nn.Module.compile`) is not returned:
    hooks on it would be part of what is compiled.
    """
    torch = sys.modules["torch"]
    modules, trained = [], set()
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, torch.nn.Module) and "_modules" in thing.__dict__:
            modules.append(thing)
        elif issubclass(kind, torch.optim.Optimizer):
            groups = thing.__dict__.get("param_groups", ())
            trained |= {id(parameter) for group in groups for parameter in group["params"]}
    parts = {id(part) for module in modules for part in module._modules.values()}
    best, most = None, 0
    for module in modules:
        if id(module) in parts or getattr(module, "_compiled_call_impl", None) is not None:
            continue
        num_trained = sum(id(parameter) in trained for parameter in module.parameters())
        if num_trained > most:
            best, most = module, num_trained
    return best

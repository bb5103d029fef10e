"""The model of a job that does not tell it: the outermost module that an optimizer trains."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

from .guard import Guard

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..record.recorder import Recorder

TRIES_BEFORE_A_STEP = 2
"""Each looks at every object of the process: some 0.15 s where there are a million."""


class RootFinder:
    """Looks for the model when the first batches are fetched, and judges it by the first step.

    By the first batch a script has mostly built, wrapped and compiled its
    model and made the optimizer. The optimizer that steps first decides: a
    model that it does not train was the wrong one.
    """

    def __init__(self, recorder: Recorder, attach: Callable[[Any], Callable[[], None]]) -> None:
        """Look for the model.

        Args:
            recorder: Where an error is told.
            attach: Follows the model that was found; returns what lets it go again.
        """
        self._guard = Guard(recorder, "root module")
        self._attach = attach
        self._root: Any = None
        self._let_go: Callable[[], None] | None = None
        self._tries_left = TRIES_BEFORE_A_STEP

    def next_begins(self) -> None:
        """Look now, if tries are left."""
        if self._guard.active and self._tries_left > 0:
            self._tries_left -= 1
            self._guard.call(self._look)

    def stepped(self, optimizer: Any, *about: object) -> None:  # noqa: ANN401
        """Look for the last time: ``optimizer`` has stepped."""
        if self._guard.active:
            self._guard.call(self._judge, optimizer)
            self._guard.active = False
            self._root = None

    def _look(self) -> None:
        self._take(find_root())

    def _judge(self, optimizer: Any) -> None:  # noqa: ANN401
        if self._root is not None:
            trained = trained_by(optimizer)
            if any(id(parameter) in trained for parameter in self._root.parameters()):
                return
        if self._let_go is not None:
            self._let_go()
        self._take(find_root(optimizer))

    def _take(self, root: Any) -> None:  # noqa: ANN401
        self._root = root
        if root is not None:
            self._tries_left = 0
            self._let_go = self._attach(root)


def find_root(optimizer: Any = None) -> Any | None:  # noqa: ANN401 - a Module
    """Return the module that is part of no other and holds most trained parameters; None if none.

    A module that compiles itself (`torch.nn.Module.compile`) is not returned:
    hooks on it would be part of what is compiled.

    Args:
        optimizer: Whose parameters count; None: those of any.
    """
    torch = sys.modules["torch"]
    objects = gc.get_objects()
    # There are millions of objects and hundreds of types: `issubclass` for the types alone.
    kinds = set(map(type, objects))
    optimizer_kinds = {kind for kind in kinds if issubclass(kind, torch.optim.Optimizer)}
    module_kinds = {kind for kind in kinds if issubclass(kind, torch.nn.Module)}
    wanted = module_kinds | optimizer_kinds
    found = [thing for thing in objects if type(thing) in wanted]
    del objects
    modules = [it for it in found if type(it) in module_kinds and "_modules" in it.__dict__]
    optimizers = [it for it in found if type(it) in optimizer_kinds]
    if optimizer is not None:
        optimizers = [optimizer]
    trained = set().union(*map(trained_by, optimizers))
    parts = {id(part) for module in modules for part in module._modules.values()}
    best, most = None, 0
    for module in modules:
        if id(module) in parts or getattr(module, "_compiled_call_impl", None) is not None:
            continue
        num_trained = sum(id(parameter) in trained for parameter in module.parameters())
        if num_trained > most:
            best, most = module, num_trained
    return best


def trained_by(optimizer: Any) -> set[int]:  # noqa: ANN401
    """Return the `id` of each parameter of an optimizer."""
    groups = optimizer.__dict__.get("param_groups", ())
    return {id(parameter) for group in groups for parameter in group["params"]}

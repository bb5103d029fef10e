"""Functions that the integrations share: layouts, settings, safe hooks, spans of saves."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, ParamSpec, TypedDict

from ..errors import is_tracer_error, print_notice
from ..install import install
from ..record.current import current_tracer, span
from ..record.plain_values import type_name
from ..record.recorder import Recorder
from ..span import SpanKind
from ..topology import Coords, Layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

P = ParamSpec("P")

_reported: set[str] = set()
"""Hooks whose failure was reported, and the notice that nothing is recorded: each once."""

NO_FOLDER = (
    "nothing is recorded: set RANKSCOPE_TRACE=DIR, a folder on a local disk, or pass spool="
    " (RANKSCOPE_DISABLE=1: no tracing and no such line)"
)


class LayoutAndCoords(TypedDict):
    """Layout and coordinates of a rank; both are known or neither."""

    layout: Layout | None
    coords: Coords | None


def install_for(
    spool: str | os.PathLike[str] | None,
    **declared: Any,  # noqa: ANN401 - as `tracer.install` has them
) -> None:
    """Install the tracer for a user who asked for it; say once if no folder is named.

    Only one process of a host says so. A tracer that the launcher installed stays.
    """
    install(spool=spool, **declared)
    is_named = spool or os.environ.get("RANKSCOPE_TRACE")
    if is_named or os.environ.get("RANKSCOPE_DISABLE") == "1" or current_tracer().enabled:
        return
    if os.environ.get("LOCAL_RANK", "0") == "0" and NO_FOLDER not in _reported:
        _reported.add(NO_FOLDER)
        print_notice(NO_FOLDER)


def data_parallel_layout(world_size: int, rank: int) -> LayoutAndCoords:
    """Return the layout and coordinates if all ranks are data parallel (DDP, FSDP, ZeRO)."""
    return {"layout": Layout(dp=world_size), "coords": Coords(dp=rank)}


def mesh_layout(rank: int, *, tp: int, cp: int, dp: int, pp: int) -> LayoutAndCoords:
    """Return the layout and coordinates in a mesh of axes (pp, dp, cp, tp), tp the fastest.

    Args:
        dp: Number of replicas times number of shards.
    """
    rest, tp_position = divmod(rank, tp)
    rest, cp_position = divmod(rest, cp)
    pp_position, dp_position = divmod(rest, dp)
    return {
        "layout": Layout(dp=dp, tp=tp, pp=pp, cp=cp),
        "coords": Coords(dp=dp_position, tp=tp_position, pp=pp_position, cp=cp_position),
    }


def read_attributes(holder: object, names: Iterable[str]) -> dict[str, object]:
    """Return the attributes of ``holder`` that exist, by name."""
    missing: Any = object()
    values = {name: getattr(holder, name, missing) for name in names}
    return {name: value for name, value in values.items() if value is not missing}


def harmless(hook: Callable[P, None]) -> Callable[P, None]:
    """Return a framework's ``hook`` such that errors of the tracer do not reach the framework.

    They are counted and printed once. A framework of another version may lack what a hook reads.
    """

    @functools.wraps(hook)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            hook(*args, **kwargs)
        except Exception as problem:
            if not is_tracer_error(problem):
                raise
            present = current_tracer()
            if isinstance(present, Recorder):
                present.swallow(problem)
            name = hook.__qualname__
            if name not in _reported:
                _reported.add(name)
                print_notice(
                    f"{name} failed, the training goes on: {type_name(problem)}: {problem}"
                )

    return call


def traced_save(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original``, which saves a checkpoint, with a span of each of its calls."""

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with span("save checkpoint", kind=SpanKind.CHECKPOINT):
            return original(*args, **kwargs)

    return save

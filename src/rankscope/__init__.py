"""Entry points for notebooks and scripts. Importing the package loads nothing else."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope import tracer
    from rankscope.analysis.price.operation_sets import Part

    from .comparison import compare
    from .notebook_figures import embed_figures
    from .run import Run, open_run, query, runs
    from .sources.bytedance_file import what_if_file

    __version__: str

_HOMES = {
    "Part": "rankscope.analysis.price.operation_sets",
    "Run": "rankscope.run",
    "compare": "rankscope.comparison",
    "embed_figures": "rankscope.notebook_figures",
    "open_run": "rankscope.run",
    "query": "rankscope.run",
    "runs": "rankscope.run",
    "what_if_file": "rankscope.sources.bytedance_file",
}

__all__ = [
    "Part",
    "Run",
    "compare",
    "embed_figures",
    "open_run",
    "query",
    "runs",
    "tracer",
    "what_if_file",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from .extras import installed_version

        return installed_version()
    if name == "tracer":
        return import_module("rankscope.tracer")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        import os

        from .extras import advise_install

        store = os.environ.get("RANKSCOPE_STORE", "")
        line = advise_install(error, user=f"rankscope.{name}", store=store)
        if line is None:
            raise
        raise ModuleNotFoundError(line, name=error.name) from None
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted({*__all__, "__doc__", "__version__"})

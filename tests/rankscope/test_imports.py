"""What each package loads: the reading side never torch, the tracer neither numpy nor pyarrow."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = [
    "rankscope.analysis.analyze",
    "rankscope.collector.http.application",
    "rankscope.collector.store.store",
    "rankscope.collector.spool.tail",
    "rankscope.collector.importers.bytedance_rows",
    "rankscope.dashboard.app",
    "rankscope.commands.app",
    "rankscope.demo.demo",
    "rankscope.server.serve",
    "rankscope.server.provider",
    "rankscope.run",
]


def loaded_by(*modules: str) -> set[str]:
    """Return the top-level modules that a fresh process holds after importing ``modules``."""
    tops = "{name.partition('.')[0] for name in sys.modules}"
    program = f"import sys, {', '.join(modules)}; print(*{tops})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_the_reading_side_never_loads_torch() -> None:
    assert "torch" not in loaded_by(*MODULES)


def test_the_tracer_loads_neither_numpy_nor_pyarrow() -> None:
    assert not {"numpy", "pyarrow"} & loaded_by("tracer")


@pytest.mark.parametrize("module", ["rankscope", "rankscope.commands.app"])
def test_the_command_starts_without_what_is_heavy(module: str) -> None:
    heavy = {"numpy", "pyarrow", "chdb", "clickhouse_connect", "dash", "plotly", "fastapi", "rich"}

    assert not heavy & loaded_by(module)

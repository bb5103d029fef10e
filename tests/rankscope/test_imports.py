"""Modules that importing each package loads, and modules that it must not load."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = [
    "rankscope.analysis.analyze",
    "rankscope.collector.http.application",
    "rankscope.collector.store.store",
    "rankscope.collector.spool.tail",
    "rankscope.collector.importers.bytedance_trace",
    "rankscope.dashboard.app",
    "rankscope.commands.app",
    "rankscope.demo.demo",
    "rankscope.server.serve",
    "rankscope.server.provider",
    "rankscope.run",
]


def loaded_by(*modules: str) -> set[str]:
    """Return the top-level modules of a fresh process after importing ``modules``."""
    tops = "{name.partition('.')[0] for name in sys.modules}"
    program = f"import sys, {', '.join(modules)}; print(*{tops})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.slow
def test_the_collector_analysis_and_dashboard_never_load_torch() -> None:
    assert "torch" not in loaded_by(*MODULES)


def test_the_tracer_loads_neither_numpy_nor_pyarrow() -> None:
    assert not {"numpy", "pyarrow"} & loaded_by("tracer")


# The job would not survive a thread of numpy: it takes the signals that the main thread blocks.
def test_the_command_line_starts_without_heavy_modules() -> None:
    heavy = {"numpy", "pyarrow", "chdb", "clickhouse_connect", "dash", "plotly", "fastapi", "rich"}

    assert not heavy & loaded_by("rankscope", "rankscope.commands.app", "rankscope.job.run_job")

"""Jobs that save: what the launcher must not change."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.cases.reports import CASES
from tests.support.tracer.reading import dropped, only_folder, read_spans

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def test_a_job_whose_checkpoint_holds_a_deep_copy_of_its_model_saves_it(tmp_path: Path) -> None:
    script = CASES / "jobs" / "save_copy.py"
    ran = subprocess.run(
        [sys.executable, "-m", "rankscope.tracer", script],
        env={**os.environ, "RANKSCOPE_TRACE": str(tmp_path), "RANKSCOPE_RUN": "saves"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["saved 0", "saved 1"]
    folder = only_folder(tmp_path)
    assert dropped(folder) == {}
    names = [row.name for row in read_spans(folder) if row.kind in {"forward", "checkpoint"}]
    assert names == ["forward", "torch.save", "forward", "torch.save"]

"""Folders of the checkout that tests read."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON_PATH = f"{ROOT}{os.pathsep}{ROOT / 'src'}"
"""Value of ``PYTHONPATH`` with which a process imports this checkout, not an installed copy."""

TESTS = ROOT / "tests"
GOLDEN = TESTS / "collector" / "golden"
"""Recorded spools, cuts and journals of released formats."""

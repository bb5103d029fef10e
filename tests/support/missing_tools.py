"""What a test does on a machine that lacks something it needs."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def lacks(sentence: str) -> NoReturn:
    """Skip the test; with ``CI=true``, where nothing is skipped for want of a tool, fail it.

    Args:
        sentence: What is missing, and how to get it.
    """
    if os.environ.get("CI") == "true":
        pytest.fail(sentence, pytrace=False)
    pytest.skip(sentence)

"""Skip of a test whose tools are missing."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def skip_for_missing(sentence: str) -> NoReturn:
    """Skip the test; with ``CI=true`` fail it, because CI must run all tests.

    Args:
        sentence: What is missing, and how to get it.
    """
    if os.environ.get("CI") == "true":
        pytest.fail(sentence, pytrace=False)
    pytest.skip(sentence)

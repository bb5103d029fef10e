"""Collected test functions, noted before any option deselects a part of them."""

from __future__ import annotations

from collections import defaultdict

import pytest

COLLECTED = pytest.StashKey[dict[str, set[str]]]()
"""Of the session's config: by test file, as a path below the checkout, its test functions."""


def functions_by_file(items: list[pytest.Item]) -> dict[str, set[str]]:
    """Return the names of the collected test functions of each file."""
    functions: dict[str, set[str]] = defaultdict(set)
    for item in items:
        file, _, name = item.nodeid.partition("::")
        functions[file].add(name.partition("[")[0])
    return functions

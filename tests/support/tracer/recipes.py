"""Trainings of which a few are tried in each run of the tests, and all at night."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from _pytest.mark import ParameterSet


def each_recipe(recipes: Iterable[str], quick: Collection[str]) -> list[ParameterSet]:
    """Return the values of the parameter ``recipe``; those that are not quick are nightly."""
    return [
        pytest.param(recipe, marks=() if recipe in quick else pytest.mark.nightly)
        for recipe in recipes
    ]


def selected_recipes(request: pytest.FixtureRequest) -> set[str]:
    """Return the recipes that the selected tests of the requesting module have as a parameter."""
    callspecs = [
        getattr(item, "callspec", None)
        for item in request.session.items
        if item.path == request.path
    ]
    return {spec.params["recipe"] for spec in callspecs if spec and "recipe" in spec.params}

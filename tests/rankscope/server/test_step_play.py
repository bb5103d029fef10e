"""Runs that are replayed with changes on a page: the last steps of a large one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.trace.errors import AnalysisError
from rankscope.server import step_view
from rankscope.server.provider import StoreProvider
from rankscope.server.reports import Reports
from rankscope.trainer.simulator.scenario import Scenario
from tests.support.rankscope.simulated_source import SimulatedSource

if TYPE_CHECKING:
    from rankscope.analysis.what_if import RunPlay
    from rankscope.collector.store.store import Store

NUM_STEPS = 8
RUN = "simulated"


def open_provider(store: Store) -> tuple[StoreProvider, int]:
    """Return the provider of a simulated run, and the spans of one of its steps."""
    source = SimulatedSource(Scenario(dp=4, num_steps=NUM_STEPS, num_microbatches=2))
    (run,) = source.runs()
    provider = StoreProvider(source, Reports(source), store=store, timeout_s=60.0)
    return provider, run.num_spans // NUM_STEPS


def play(provider: StoreProvider) -> RunPlay:
    played = provider.play(RUN)
    assert played is not None
    return played


def test_of_a_large_run_the_last_steps_are_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, of_step = open_provider(store)
    whole = play(provider).reading.steps
    monkeypatch.setattr(step_view, "MAX_SPANS", 3 * of_step)
    large, _ = open_provider(store)
    monkeypatch.setattr(step_view, "MAX_SPANS", of_step // 2)
    larger, _ = open_provider(store)
    one = play(larger).reading.steps
    monkeypatch.setattr(step_view, "MAX_SPANS", 3 * of_step)

    assert len(whole) == NUM_STEPS
    assert play(large).reading.steps == whole[-3:]
    assert one == whole[-1:]


def test_a_step_that_is_too_large_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    provider, of_step = open_provider(store)
    monkeypatch.setattr(step_view, "MAX_PLAYED_SPANS", of_step - 1)

    with pytest.raises(AnalysisError, match="a step has about"):
        provider.play(RUN)

"""Epochs and loss of a stored run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.server.provider import StoreProvider
from rankscope.server.reports import Reports
from rankscope.sources.store_source import StoreSource

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store

RUN = "history-of-two-epochs"


def step_row(epoch: int, step: int, rank: int, begin_ns: int, loss: float) -> dict[str, object]:
    return {
        "run_id": RUN,
        "epoch": epoch,
        "step": step,
        "rank": rank,
        "start_ns": begin_ns,
        "end_ns": begin_ns + 10,
        "num_tokens": -1,
        "loss": loss,
        "peak_memory_bytes": -1,
        "segment": epoch * 10 + rank,
        "row": step,
    }


def test_the_loss_of_a_step_is_the_mean_of_the_ranks_that_know_it(store: Store) -> None:
    nan = float("nan")
    rows = [step_row(0, step, rank, 10 * step, 4.0 + rank) for step in (0, 1) for rank in (0, 1)]
    rows += [step_row(1, 1, rank, 30, nan if rank else 2.0) for rank in (0, 1)]
    store.insert_rows("steps", rows)
    source = StoreSource(store)
    provider = StoreProvider(source, Reports(source), store=store)

    found = provider.history(RUN)

    assert found is not None
    assert found.loss_by_step == {0: 4.5, 1: 2.0}
    assert [one.num_repeated for one in found.epochs] == [1, 0]
    assert provider.history("unknown") is None

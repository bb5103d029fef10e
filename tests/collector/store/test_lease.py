from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.store import lease as lease_module
from rankscope.collector.store.lease import PAUSE_S, TTL_S, Lease

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store
    from tests.collector.conftest import FakeClock

pytestmark = pytest.mark.slow


def claims(store: Store, name: str, clock: FakeClock, num: int = 2) -> list[Lease]:
    return [
        Lease(store, name=name, is_shared=True, monotonic_s=lambda: clock.now_ns / 1e9)
        for _ in range(num)
    ]


def test_the_first_of_two_processes_has_the_lease(
    store: Store, run_id: str, clock: FakeClock
) -> None:
    first, second = claims(store, run_id, clock)
    assert not first.is_held

    first.renew()
    second.renew()
    first.renew()
    assert (first.is_held, second.is_held) == (True, False)

    # WHEN it ends THEN the other takes over at its next sign of life
    first.release()
    assert not first.is_held
    second.renew()
    assert second.is_held


def test_a_lease_that_is_not_renewed_ends_before_another_may_take_it(
    store: Store, run_id: str, clock: FakeClock
) -> None:
    (first,) = claims(store, run_id, clock, num=1)
    first.renew()

    clock.advance_s(TTL_S - PAUSE_S - 1)
    assert first.is_held
    clock.advance_s(2)
    assert not first.is_held


def test_a_process_that_was_silent_is_behind_those_that_were_not(
    store: Store, run_id: str, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = claims(store, run_id, clock)
    first.renew()
    monkeypatch.setattr(lease_module, "TTL_S", 0)  # as if its sign of life were too old
    second.renew()
    monkeypatch.undo()
    second.renew()

    # the first is live again within the time, and has claimed first
    assert not second.is_held
    monkeypatch.setattr(lease_module, "TTL_S", 0)
    first.renew()
    monkeypatch.undo()
    first.renew()
    second.renew()
    assert (first.is_held, second.is_held) == (False, True)


def test_an_embedded_store_needs_no_lease(store: Store) -> None:
    if store.path is not None:
        assert Lease(store).is_held

from __future__ import annotations

import gc
from typing import Any

from rankscope.trainer.faults.garbage import GarbageHeap

PAUSE_NS = 20_000_000


def seen_by_callbacks(heap: GarbageHeap, *, is_seen: bool) -> list[str]:
    phases: list[str] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if info["generation"] == 2:
            phases.append(phase)

    gc.callbacks.append(note)
    try:
        heap.collect(is_seen=is_seen)
        assert gc.callbacks[-1] is note
    finally:
        gc.callbacks.remove(note)
    return phases


def test_a_collection_is_told_to_callbacks_or_hidden_from_them() -> None:
    heap = GarbageHeap(PAUSE_NS)

    assert seen_by_callbacks(heap, is_seen=True)[:2] == ["start", "stop"]
    assert seen_by_callbacks(heap, is_seen=False) == []


def test_garbage_is_really_collected() -> None:
    heap = GarbageHeap(PAUSE_NS)
    circle: list[object] = []
    circle.append(circle)
    before = gc.get_stats()[2]["collected"]
    del circle

    heap.collect(is_seen=True)

    assert gc.get_stats()[2]["collected"] > before

"""How much memory and swap a host has, and how much of it is in use."""

from __future__ import annotations

import psutil

from .sample import Sample


class MemorySource:
    """Memory and swap of the host."""

    name = "memory"

    def read(self, at_ns: int) -> list[Sample]:
        """Return sizes, and what has been swapped in and out since the host started."""
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        values = {
            "memory-total-bytes": memory.total,
            "memory-available-bytes": memory.available,
            "memory-used-bytes": memory.used,
            "swap-total-bytes": swap.total,
            "swap-used-bytes": swap.used,
            "swap-in-bytes": swap.sin,
            "swap-out-bytes": swap.sout,
        }
        return [Sample(at_ns, name, float(value)) for name, value in values.items()]

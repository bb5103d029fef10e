"""What the device's allocator tells of memory."""

from __future__ import annotations

import sys

from ..span import NONE


def peak_memory_bytes() -> int:
    """Return the device allocator's peak since the process began; `NONE` without a device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return NONE
    return int(torch.cuda.max_memory_allocated())

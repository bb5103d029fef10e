"""Memory of the machine, or of the cgroup that limits this process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

CGROUP_LIMITS = {
    "": (Path("/sys/fs/cgroup"), "memory.max"),
    "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
}
"""Root and limit file by controller: version 2 of cgroups names none.

Source: cgroups(7); the kernel's cgroup-v1/memory and cgroup-v2."""


def machine_bytes() -> int:
    """Return the memory of the machine, or the limit of this process's cgroups if it is lower."""
    num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in CGROUP_LIMITS:
                continue
            root, name = CGROUP_LIMITS[controllers]
            for folder in (Path(path), *Path(path).parents):
                with suppress(OSError, ValueError):  # no such file, or the text "max"
                    limit = (root / folder.relative_to("/") / name).read_text(encoding="ascii")
                    num_bytes = min(num_bytes, int(limit))
    return num_bytes

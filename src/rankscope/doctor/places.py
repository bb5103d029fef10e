"""The file system of a path: its type, and the nearest folder that exists."""

from __future__ import annotations

import re
from pathlib import Path

NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "beegfs", "gpfs", "ceph", "9p", "fuse.")
"""Their files can vanish under a memory map, which kills its process with SIGBUS."""

MOUNTS = Path("/proc/self/mounts")


def nearest_folder(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    absolute = path.absolute()
    return next(each for each in (absolute, *absolute.parents) if each.exists())


def file_system(path: Path, mounts: Path) -> str:
    """Return the type of the file system of an existing path; "" if ``mounts`` does not say."""
    best, kind = -1, ""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    resolved = path.resolve()
    for line in lines:
        _, point, found, *_ = line.split(" ")
        folder = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), point))
        if resolved.is_relative_to(folder) and len(folder.parts) >= best:
            best, kind = len(folder.parts), found
    return kind

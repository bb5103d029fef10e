"""The folder for the records of a job, on a file system that a memory map may use."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rankscope.collector.store.location import data_folder

from ..doctor.places import MOUNTS, NETWORK_FILE_SYSTEMS, file_system, nearest_folder


def make_job_folder(name: str) -> Path:
    """Make the folder of a job: in the data folder, or a temporary one if that is on a network.

    Raises:
        OSError: It cannot be made.
    """
    jobs = data_folder() / "jobs"
    if file_system(nearest_folder(jobs), MOUNTS).startswith(NETWORK_FILE_SYSTEMS):
        return Path(tempfile.mkdtemp(prefix=f"rankscope-{name}-"))
    jobs.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=jobs))

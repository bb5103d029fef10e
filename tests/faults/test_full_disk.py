"""A full disk below the embedded store of a collector (fault B9)."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.faults.checker import check
from tests.faults.cycles import COUNT_ROWS, NUM_RANKS, SELECT_ROWS, WholePath, seen_row
from tests.support.mounts import needs_mounts

if TYPE_CHECKING:
    from tests.faults.checker import Key

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

DISK_MIB = 300
"""A collector accepts nothing with less than 256 MiB free."""

BLOCK_BYTES = 1 << 20
OWN_TOKEN = re.compile(r"\?token=(\S+)")


class SmallDisk(WholePath):
    """A data path whose store is on a small disk."""

    def commands(self) -> dict[str, list[str]]:
        commands = super().commands()
        self.store.mkdir(exist_ok=True)
        mount = f"mount -t tmpfs -o size={DISK_MIB}m tmpfs {shlex.quote(str(self.store))}"
        serve = shlex.join(commands["collector"])
        commands["collector"] = ["unshare", "-rm", "sh", "-c", f"{mount} && exec {serve}"]
        return commands

    @property
    def disk(self) -> Path:
        """Folder of the store, as the collector sees it."""
        return Path(f"/proc/{self.pid_of('collector')}/root{self.store}")

    def fill(self) -> None:
        """Fill the disk."""
        filler = os.open(self.disk / "filler", os.O_WRONLY | os.O_CREAT)
        try:
            size_bytes = BLOCK_BYTES
            while size_bytes >= 1:
                at = os.fstat(filler).st_size
                try:
                    os.posix_fallocate(filler, at, size_bytes)
                except OSError:
                    size_bytes //= 16
        finally:
            os.close(filler)

    def make_room(self) -> None:
        """Free the disk."""
        (self.disk / "filler").unlink()

    def query(self, sql: str) -> str | None:
        """Query the collector; None if it does not answer."""
        *_, token = OWN_TOKEN.findall((self.folder / "collector.log").read_text())
        return self.ask("/", sql, **{"X-ClickHouse-Key": token})

    def num_stored(self) -> int:
        return int(self.query(COUNT_ROWS) or 0)

    def seen(self) -> list[tuple[Key, str]]:
        """Return the key of each row and the hash of its content."""
        sql = SELECT_ROWS.format(final=" FINAL") + " FORMAT JSONEachRow"
        rows = [json.loads(line) for line in (self.query(sql) or "").splitlines()]
        return [seen_row(row | {"duration_ns": int(row["duration_ns"])}) for row in rows]


def test_a_full_disk_blocks_no_query_and_loses_no_row(tmp_path: Path) -> None:
    needs_mounts()
    with SmallDisk(folder=tmp_path / "path", chooser=random.Random(2)) as path:
        # GIVEN rows that have arrived
        path.write()
        num_first = NUM_RANKS * path.rows_a_burst
        path.wait_for(lambda: path.num_stored() >= num_first - NUM_RANKS)

        # WHEN the disk is full, and more come
        path.fill()
        num_before = path.num_stored()
        path.write()
        path.wait_for(lambda: "MiB free" in (path.folder / "collector.log").read_text())

        # THEN it accepts nothing, reports this, and answers queries as before
        assert path.ask("/readyz") is None
        assert path.ask("/healthz") is not None
        assert path.num_stored() == num_before

        # AND continues by itself when there is space
        path.make_room()
        path.drain()
        verdict = check(path.folder / "oracle", path.seen())
        assert verdict.is_clean, (verdict, path.logs())
        assert verdict.num_stored == 2 * num_first

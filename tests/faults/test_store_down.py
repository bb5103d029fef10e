"""Outages and kills of the ClickHouse server while collector, agent and ranks run."""

from __future__ import annotations

import random
import re
import time
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.spool.folder import used_bytes
from rankscope.collector.store.deduplicated_reads import read_stored_spans
from rankscope.collector.store.store import open_store
from tests.faults.checker import check, content_hash, key_of
from tests.faults.cycles import NUM_RANKS, RUN
from tests.faults.server_path import ServerPath
from tests.support.tracer.reading import count_dropped, process_folders, read_spans

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.checker import Key

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

SEGMENT_BYTES = 32_768
SEGMENT_ROWS = (SEGMENT_BYTES - 4096) // 128
NUM_KILLS = 4
LONGEST_S = 1.2
"""Time between a burst and a kill; the agent sends once per second."""

LIVE, OVER = 0, (1, 2, 3)
NUM_OVER = 3 * SEGMENT_ROWS
LIVE_SEGMENTS = 4
KEPT_SEGMENTS = 4
"""Ranks that have ended."""

OTHER_BYTES = 1_084_000
"""Bytes of a process besides its segments: names (allocated in advance), manifest and, while it
runs, exit record. Together less than a segment remains for all processes."""

MAX_SPOOL_BYTES = (1 + len(OVER)) * OTHER_BYTES + (LIVE_SEGMENTS + KEPT_SEGMENTS) * SEGMENT_BYTES
OWN_REASONS = {"spool-full", "no-segment"}
WORD = re.compile(r"\w+")
GIVEN_UP = re.compile(r"(\d+) rows that were not sent are dropped")
SELECT_SPANS = "SELECT rank, name, kind FROM spans{final} WHERE startsWith(name, 's')"
DROPPED = "SELECT rank, dropped FROM ranks FINAL ORDER BY rank"


def names_on_disk(path: ServerPath, rank: int) -> set[str]:
    return {span.name for span in read_spans(process_folders(path.spool)[rank])}


def num_given_up(path: ServerPath) -> int:
    """Return the number of rows that the agent reports as dropped."""
    return sum(map(int, GIVEN_UP.findall((path.folder / "agent.log").read_text())))


def num_gone(path: ServerPath, *, num_live_kept: int) -> int:
    """Return how many rows of all ranks were stored in segments that are no longer on disk.

    On a busy machine a segment may have been created too late for some.
    """
    folders = process_folders(path.spool)
    num_over_kept = NUM_OVER * len(OVER) - sum(count_dropped(folders[rank]) for rank in OVER)
    num_kept = num_live_kept + num_over_kept
    return num_kept - sum(len(names_on_disk(path, rank)) for rank in (LIVE, *OVER))


def num_segments(path: ServerPath) -> int:
    return len(list(path.spool.glob("run/*/seg-*")))


def is_kept(path: ServerPath, rank: int) -> bool:
    """Record a span on a rank; return whether it was within the quota."""
    folder = process_folders(path.spool)[rank]
    num_before = count_dropped(folder)
    path.record(rank, 1)
    return count_dropped(folder) == num_before


def check_newest_dropped(kept: set[str], *, num_live: int, num_kept: int) -> None:
    """Check which rows a rank over its quota kept.

    On a busy machine a segment may be created too late, which costs a few rows in the middle. If
    the agent waits for an answer about a newer segment, it keeps that one and drops a whole one of
    this rank instead.
    """
    assert num_kept - len(kept) in {0, SEGMENT_ROWS}
    assert num_kept < num_live
    assert kept <= {f"s{LIVE}-{k}" for k in range(num_live)}
    assert f"s{LIVE}-{num_live - 1}" not in kept


def check_short_log(log: str) -> None:
    """Check the log of a collector whose store was down for less than two minutes."""
    assert 1 <= log.count("store-unreachable") <= 3, log
    assert 1 <= log.count("does not answer") <= 3, log
    assert not {"secret", "urllib3", "clickhouse_connect", "query_id"} & set(WORD.findall(log)), log


def seen(path: ServerPath) -> list[tuple[Key, str]]:
    """Return the spans in results of queries.

    If the store is killed before the ledger has a cut, its rows are stored twice.
    """
    with open_store(path.store_url) as store:
        final = " FINAL" if read_stored_spans(store, RUN).has_repeated else ""
        rows = store.rows(SELECT_SPANS.format(final=final))
    return [
        (key_of(row["rank"], row["name"]), content_hash(row["name"], row["kind"])) for row in rows
    ]


@pytest.mark.nightly
def test_a_store_down_beyond_every_capacity_loses_the_newest_rows_and_counts_them(
    tmp_path: Path,
) -> None:
    folder, chooser = tmp_path / "path", random.Random(1)
    with ServerPath(folder=folder, chooser=chooser, max_spool_bytes=MAX_SPOOL_BYTES) as path:
        # GIVEN a rank whose rows arrive, with a quota of four segments
        limits = {
            "RANKSCOPE_SEGMENT_BYTES": str(SEGMENT_BYTES),
            "RANKSCOPE_SPOOL_BYTES": str(LIVE_SEGMENTS * SEGMENT_BYTES),
        }
        path.start_rank(LIVE, **limits)
        num_live = path.record(LIVE, 100)
        path.wait_for(lambda: path.num_stored() >= num_live - 1)

        # WHEN the store is down, the rank continues and others start and end
        path.kill_only("store")
        while num_live < 2 * LIVE_SEGMENTS * SEGMENT_ROWS:
            num_live = path.record(LIVE, 50)
        path.wait_for(lambda: path.num_refused() > 0)
        for rank in OVER:
            path.start_rank(rank, **limits)
            path.record(rank, NUM_OVER)
            path.end_rank(rank)
        path.wait_for(lambda: num_given_up(path) > 0)
        path.wait_for(lambda: used_bytes(path.spool) <= MAX_SPOOL_BYTES)

        # THEN the collector refuses all rows and keeps running
        assert path.is_ready() is False
        assert path.ask("/healthz") is not None
        # AND the rank has dropped its newest rows, and its segments hold all others
        assert len(list(process_folders(path.spool)[LIVE].glob("seg-*"))) <= LIVE_SEGMENTS
        num_rank_dropped = count_dropped(process_folders(path.spool)[LIVE])
        num_kept = num_live - num_rank_dropped
        check_newest_dropped(names_on_disk(path, LIVE), num_live=num_live, num_kept=num_kept)
        # AND the agent has dropped whole segments, counted to the row; it reports them when they
        # are gone
        path.wait_for(lambda: num_given_up(path) == num_gone(path, num_live_kept=num_kept))

        # AND the collector has logged one or two lines, without an address or a secret
        check_short_log((folder / "collector.log").read_text())

        # WHEN the store is back
        path.start("store")
        path.wait_for(lambda: is_kept(path, LIVE))
        path.end_rank(LIVE)
        path.wait_for(lambda: num_segments(path) == 0)

        # THEN all kept rows are stored once, and every other row is in a drop count
        num_rank_dropped = count_dropped(process_folders(path.spool)[LIVE])
        dropped = {row["rank"]: row["dropped"] for row in path.rows(DROPPED)}
        by_ranks = {reason: num for reason, num in dropped[LIVE].items() if reason in OWN_REASONS}
        assert sum(by_ranks.values()) == num_rank_dropped
        by_agent = [dropped[rank].get("agent-spool-full", 0) for rank in (LIVE, *OVER)]
        assert sum(by_agent) == num_given_up(path)
        num_late = sum(count_dropped(process_folders(path.spool)[rank]) for rank in OVER)
        num_dropped = sum(sum(reasons.values()) for reasons in dropped.values())
        assert num_dropped == num_rank_dropped + num_late + num_given_up(path)
        verdict = check(folder / "oracle", seen(path), num_dropped=num_dropped)
        assert verdict.is_clean, (verdict, path.logs())


@pytest.mark.nightly
def test_repeated_kills_of_the_store_lose_and_duplicate_no_row(tmp_path: Path) -> None:
    chooser = random.Random(3)
    with ServerPath(folder=tmp_path / "path", chooser=chooser, rows_a_burst=50) as path:
        # WHEN it is killed at any moment while rows arrive
        for _ in range(NUM_KILLS):
            path.write()
            time.sleep(chooser.uniform(0.0, LONGEST_S))
            path.kill_only("store")
            path.write()
            path.start("store")
        path.drain()

        # THEN each row is stored once, without a restart of the collector
        verdict = path.verdict()
        assert verdict.is_clean, (verdict, path.logs())
        assert verdict.num_stored == 2 * NUM_KILLS * NUM_RANKS * path.rows_a_burst

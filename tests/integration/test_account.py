"""A rank that loses spans: the command, its JSON and the page account for every record."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from rankscope.analysis.analyze import analyze_run
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from rankscope.commands.app import app
from rankscope.dashboard.pages.overview_cards import quality_list
from rankscope.sources.store_source import StoreSource
from tests.support.dashboard.page_text import words
from tests.support.tracer.recording import run_script

if TYPE_CHECKING:
    from pathlib import Path


NUM_SPANS = 4_000
SPOOL_BYTES, SEGMENT_BYTES = 1 << 17, 1 << 15
"""Room for a few segments of 224 records: the rest is dropped."""

SCRIPT = """
    import os, signal, time
    from rankscope import tracer
    from rankscope.tracer.spool import PROCESS_FILE, read_counts
    from tests.support.waiting import wait_until

    recorder = tracer.install()
    for step in range(4):
        tracer.step(step)
        for _ in range({num_spans} // 4):
            with tracer.span("work"):
                pass
    process_file = recorder.folder / PROCESS_FILE
    for _ in range(2):  # the first update may have begun before the last span
        now_ns = time.monotonic_ns()
        wait_until(lambda: read_counts(process_file.read_bytes()).at_ns > now_ns)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def analyze(url: str, *options: str) -> str:
    """Return what `rankscope analyze` prints of the run."""
    done = CliRunner().invoke(app, ["analyze", "run", "--store", url, *options])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.slow
def test_each_record_of_a_killed_rank_with_a_full_spool_is_accounted_for(tmp_path: Path) -> None:
    done = run_script(
        SCRIPT.format(num_spans=NUM_SPANS),
        tmp_path / "spool",
        RANKSCOPE_SPOOL_BYTES=str(SPOOL_BYTES),
        RANKSCOPE_SEGMENT_BYTES=str(SEGMENT_BYTES),
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    url = f"chdb://{tmp_path / 'store'}"
    with open_store(url) as store:
        SpoolTail(tmp_path / "spool", StoreWriter(store)).poll()
        report = analyze_run(StoreSource(store), "run")
    page = words(quality_list(report))

    quality = json.loads(analyze(url, "--json"))["quality"]
    text = " ".join(analyze(url).split())

    produced, stored = quality["produced_spans"], quality["stored_spans"]
    dropped, buffered = quality["dropped_spans"], quality["buffered_spans"]
    assert produced == stored + dropped + buffered
    assert stored > 0
    assert produced >= NUM_SPANS
    assert dropped > NUM_SPANS // 4
    assert sum(quality["dropped_by_reason"].values()) == dropped
    assert set(quality["dropped_by_reason"]) & {"spool-full", "no-segment"}
    (of_rank,) = quality["by_rank"]
    assert (of_rank["rank"], of_rank["produced"], of_rank["stored"]) == (0, produced, stored)
    assert f"{produced:,} records = {stored:,} stored + {dropped:,} dropped" in text
    assert f"{produced:,}" in page
    assert f"{dropped:,}" in page

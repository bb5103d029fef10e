from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.collector.retention.deletion import Deletions
from rankscope.collector.retention.retention import HOUR_NS, Retention, RetentionPolicy
from rankscope.collector.retention.span_days import DAY_NS
from rankscope.collector.store.lease import Lease
from rankscope.collector.store.store import open_store
from rankscope.errors import BadInputError
from rankscope.server.http_server import read_part_checks
from rankscope.server.rollups import Rollups
from rankscope.server.upkeep import (
    EXPIRY_PAUSE_NS,
    FIRST_EXPIRY_NS,
    RECHECK_NS,
    PartChecks,
    Upkeep,
    check_part,
    parse_keep,
)
from rankscope.simulation import store_simulation
from rankscope.sources.store_source import StoreSource
from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Scenario
from rankscope.trainer.simulator.simulation import simulate
from tests.collector.retention.test_retention import NOW_NS, steps_with_spans, store_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankscope.collector.store.store import Store


@dataclass
class Clock:
    """A clock that only a test advances."""

    now_ns: int = 0

    def __call__(self) -> int:
        return self.now_ns


@pytest.mark.slow
def test_late_rows_of_a_deleted_run_are_removed(tmp_path: Path) -> None:
    with open_store(f"chdb://{tmp_path}") as store:
        store.insert_rows("runs", [{"run_id": "job"}])
        deletions = Deletions(store)
        deletions.delete("job")
        store.insert_rows("spans", [{"run_id": "job"}])
        lines: list[str] = []
        upkeep = Upkeep(
            deletions,
            Retention(store, deletions),
            Rollups(store, monotonic_ns=lambda: 0),
            lease=Lease(store),
            say=lines.append,
        )

        upkeep.turn()
        upkeep.turn()

        assert store.rows("SELECT count() AS n FROM spans") == [{"n": 0}]
        assert lines == ["removed late rows of the deleted run 'job'"]


@pytest.mark.slow
def test_rows_expire_a_minute_after_the_start_and_then_every_hour(tmp_path: Path) -> None:
    with open_store(f"chdb://{tmp_path}") as store:
        deletions, clock, lines = Deletions(store), Clock(), list[str]()
        retention = Retention(store, deletions, unix_ns=lambda: NOW_NS + 3 * DAY_NS)
        upkeep = Upkeep(
            deletions,
            retention,
            Rollups(store, monotonic_ns=lambda: 0),
            lease=Lease(store),
            say=lines.append,
            monotonic_ns=clock,
        )
        store_run(store, "first")

        upkeep.turn()
        assert lines == []
        clock.now_ns += FIRST_EXPIRY_NS
        upkeep.turn()
        assert lines == ["removed 201 expired spans of 1 runs"]
        assert steps_with_spans(store, "first") == []

        store_run(store, "second")
        clock.now_ns += EXPIRY_PAUSE_NS - 1
        upkeep.turn()
        assert len(lines) == 1
        clock.now_ns += 1
        upkeep.turn()
        assert len(lines) == 2


def test_durations_are_hours_days_or_forever() -> None:
    assert parse_keep(spans="48h", findings="30d", runs="forever") == RetentionPolicy(
        spans_ns=48 * HOUR_NS, findings_ns=30 * DAY_NS, runs_ns=None
    )


@pytest.mark.parametrize("text", ["", "48", "2 d", "-1d", "1w", "1.5h", "never"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="--keep-spans"):
        parse_keep(spans=text, findings="30d", runs="365d")


def test_each_duration_must_be_at_least_the_one_before() -> None:
    with pytest.raises(BadInputError, match="at least as long"):
        parse_keep(spans="31d", findings="30d", runs="365d")
    with pytest.raises(BadInputError, match="at least as long"):
        parse_keep(spans="forever", findings="30d", runs="365d")


@pytest.mark.slow
def test_a_run_with_expired_spans_is_analysed_with_a_warning(tmp_path: Path) -> None:
    with open_store(f"chdb://{tmp_path}") as store:
        simulation = simulate(
            Scenario(
                dp=4,
                num_steps=30,
                faults=parse_simulated_faults(["slow-compute:rank=2,factor=2,steps=20-24"]),
            ),
            run_id="job",
        )
        store_simulation(store, simulation, simulation.tables())
        source = StoreSource(store)
        before = analyze_run(source, "job")
        finding = {"run_id": "job", "cause": "slow-compute", "first_step": 20, "last_step": 24}
        store.insert_rows("findings", [finding])
        later = time.time_ns() + 3 * DAY_NS
        Retention(store, Deletions(store), unix_ns=lambda: later).expire()

        after = analyze_run(source, "job")

        assert len(before.steps) == 30
        assert after.steps == tuple(range(12, 30))
        assert (after.top_finding.cause, after.top_finding.ranks) == ("slow-compute", (2,))
        assert any(
            "up to step 29 have expired, except those of steps 12-29 around findings" in warning
            for warning in after.quality.warnings
        )


@pytest.fixture
def checked_store(tmp_path: Path) -> Iterator[tuple[Store, Path]]:
    """A store with one part in table ``owners``, and the folder of that part."""
    with open_store(f"chdb://{tmp_path}") as store:
        store.insert_rows("owners", [{"run_id": f"run-{i}", "at_ns": i} for i in range(100)])
        (row,) = store.rows("SELECT path FROM system.parts WHERE active AND table = 'owners'")
    for folder in tmp_path.glob("store/*/*/*"):
        os.utime(folder, (0, 0))  # old enough for a check
    with open_store(f"chdb://{tmp_path}") as store:
        yield store, Path(row["path"])


@pytest.mark.slow
def test_a_part_with_a_wrong_bit_is_reported_before_it_is_read(
    checked_store: tuple[Store, Path],
) -> None:
    store, part = checked_store
    clock, lines = Clock(), list[str]()
    checks = PartChecks(store, say=lines.append, monotonic_ns=clock)

    def check_all() -> None:
        for _ in range(20):
            checks.turn()
            clock.now_ns += DAY_NS // 20

    check_all()
    assert (lines, checks.num_damaged) == ([], {})

    data = bytearray((part / "data.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (part / "data.bin").write_bytes(data)
    check_all()
    assert lines == []  # each part is checked once a week

    clock.now_ns += RECHECK_NS
    check_all()
    (line,) = lines
    assert line.startswith(f"table owners has a damaged part at {part}")
    assert "Checksum mismatch for file data.bin" in line
    assert checks.num_damaged == {"owners": 1}
    (reading,) = read_part_checks(checks)
    assert (reading.name, reading.values) == ("store_damaged_parts", {"owners": 1.0})

    # WHEN it is checked again, it is not reported twice; WHEN it is gone, it is not counted
    clock.now_ns += RECHECK_NS
    check_all()
    assert len(lines) == 1
    store.command("TRUNCATE TABLE owners")
    clock.now_ns += RECHECK_NS
    check_all()
    assert checks.num_damaged == {}


def test_a_part_that_is_gone_is_not_damaged(tmp_path: Path) -> None:
    with open_store(f"chdb://{tmp_path}") as store:
        assert check_part(store, "clock", "all_7_7_0") is None
        assert check_part(store, "clock", "' OR '1") is None

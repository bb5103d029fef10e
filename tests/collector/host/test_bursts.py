from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.host.bursts import BurstClocks, BurstError, BurstRequests, take_burst
from rankscope.collector.host.sample import Sample

if TYPE_CHECKING:
    from pathlib import Path

MS = 1_000_000
UNIX_NS = 1_700_000_000_000_000_000


@dataclass
class Machine:
    """Clock that advances with sleeps and readings, and a source that uses it."""

    read_costs_ns: int
    now_ns: int = 0
    cpu_ns: int = 0
    read_at_ns: list[int] = field(default_factory=list)
    name: str = "fake"
    num_samples: int = 1

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    def read(self, at_ns: int) -> list[Sample]:
        self.read_at_ns.append(self.now_ns)
        self.now_ns += self.read_costs_ns
        self.cpu_ns += self.read_costs_ns
        return [Sample(at_ns, "x-bytes", 1.0)] * self.num_samples

    def clocks(self) -> BurstClocks:
        return BurstClocks(
            monotonic_ns=lambda: self.now_ns,
            unix_ns=lambda: UNIX_NS + self.now_ns,
            cpu_ns=lambda: self.cpu_ns,
            sleep=self.sleep,
        )


def test_readings_keep_to_the_grid_and_the_cost_is_reported() -> None:
    machine = Machine(read_costs_ns=MS // 4)

    burst = take_burst(machine, period_ns=MS, duration_ns=5 * MS, clocks=machine.clocks())

    assert machine.read_at_ns == [0, MS, 2 * MS, 3 * MS, 4 * MS]
    assert [sample.at_ns for sample in burst.samples] == [UNIX_NS + each * MS for each in range(5)]
    assert (burst.num_rounds, burst.num_missed, burst.num_dropped) == (5, 0, 0)
    assert burst.cpu_ns == 5 * MS // 4
    assert burst.duration_ns == 4 * MS + MS // 4
    assert burst.cpu_ratio == pytest.approx(1.25 / 4.25)


def test_overrun_readings_are_counted_and_skipped() -> None:
    # A reading takes 2.5 periods, so those at 1, 2, 4, 5, 7 and 8 ms are missed.
    machine = Machine(read_costs_ns=5 * MS // 2)

    burst = take_burst(machine, period_ns=MS, duration_ns=10 * MS, clocks=machine.clocks())

    assert machine.read_at_ns == [0, 3 * MS, 6 * MS, 9 * MS]
    assert (burst.num_rounds, burst.num_missed) == (4, 6)


def test_samples_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankscope.collector.host.bursts.MAX_SAMPLES", 7)
    machine = Machine(read_costs_ns=0, num_samples=3)

    burst = take_burst(machine, period_ns=MS, duration_ns=4 * MS, clocks=machine.clocks())

    assert (len(burst.samples), burst.num_dropped) == (7, 5)


@pytest.mark.parametrize(
    ("period_ns", "duration_ns"),
    [(MS - 1, MS), (10 * MS + 1, 20 * MS), (MS, 0), (MS, 10_000 * MS + 1)],
)
def test_a_burst_out_of_range_is_refused(period_ns: int, duration_ns: int) -> None:
    machine = Machine(read_costs_ns=0)
    with pytest.raises(BurstError):
        take_burst(machine, period_ns=period_ns, duration_ns=duration_ns, clocks=machine.clocks())
    assert machine.read_at_ns == []


def asked(folder: Path, text: str) -> tuple[list[Sample], list[str]]:
    """Return the samples and the log lines of a burst that a file requests."""
    path = folder / "burst.json"
    path.write_text(text)
    samples: list[Sample] = []
    lines: list[str] = []
    bursts = BurstRequests(path, samples.extend, say=lines.append)
    bursts.poll()
    bursts.join()
    assert not path.exists()
    return samples, lines


def test_a_burst_is_taken_once_and_reports_its_cost(tmp_path: Path) -> None:
    text = '{"source": "cpu", "period_ms": 10, "duration_ms": 100}'

    samples, (line,) = asked(tmp_path, text)

    by_name = {sample.name: sample.value for sample in samples}
    assert 0 <= by_name["burst-cpu-ratio"] <= 1.5
    assert by_name["burst-num-dropped"] == 0
    num_rounds = int(line.split()[1])
    assert num_rounds + by_name["burst-num-missed"] == 10
    assert "readings of cpu" in line


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "invalid request"),
        ("[1]", "invalid request"),
        ('{"source": "cpu", "period_ms": "x", "duration_ms": 1}', "invalid request"),
        ('{"source": "cpu", "period_ms": 1e999, "duration_ms": 1}', "invalid request"),
        ('{"source": "../etc", "period_ms": 1, "duration_ms": 1}', "give one of cpu, disk"),
        ('{"source": "cpu", "period_ms": 0.1, "duration_ms": 1}', "must be 1 to 10 ms"),
        ('{"source": "cpu", "period_ms": 1, "duration_ms": 60000}', "at most 10000 ms"),
    ],
)
def test_an_invalid_request_is_logged_and_starts_no_burst(
    text: str, reason: str, tmp_path: Path
) -> None:
    samples, (line,) = asked(tmp_path, text)

    assert samples == []
    assert reason in line


def test_without_a_file_nothing_is_done(tmp_path: Path) -> None:
    lines: list[str] = []

    BurstRequests(tmp_path / "burst.json", lambda _: None, say=lines.append).poll()

    assert lines == []

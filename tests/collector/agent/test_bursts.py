from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.agent.bursts import BurstDesk

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.host.sample import Sample


def asked(folder: Path, text: str) -> tuple[list[Sample], list[str]]:
    """Return the samples and the lines of a desk at which a file asks for a burst."""
    path = folder / "burst.json"
    path.write_text(text)
    samples: list[Sample] = []
    lines: list[str] = []
    desk = BurstDesk(path, samples.extend, say=lines.append)
    desk.look()
    desk.join()
    assert not path.exists()
    return samples, lines


def test_a_burst_is_taken_once_and_tells_what_it_cost(tmp_path: Path) -> None:
    text = '{"source": "cpu", "period_ms": 10, "duration_ms": 100}'

    samples, (line,) = asked(tmp_path, text)

    by_name = {sample.name: sample.value for sample in samples}
    assert 0 <= by_name["burst-cpu-ratio"] <= 1.5
    assert by_name["burst-num-dropped"] == 0
    num_rounds = int(line.split()[1])
    assert num_rounds + by_name["burst-num-missed"] == 10
    assert "readings of cpu" in line


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "asks for no burst"),
        ("[1]", "asks for no burst"),
        ('{"source": "cpu", "period_ms": "x", "duration_ms": 1}', "asks for no burst"),
        ('{"source": "cpu", "period_ms": 1e999, "duration_ms": 1}', "asks for no burst"),
        ('{"source": "../etc", "period_ms": 1, "duration_ms": 1}', "there are cpu, disk"),
        ('{"source": "cpu", "period_ms": 0.1, "duration_ms": 1}', "every 1 to 10 ms"),
        ('{"source": "cpu", "period_ms": 1, "duration_ms": 60000}', "at most 10000 ms"),
    ],
)
def test_what_is_no_request_is_told_and_brings_nothing(
    text: str, told: str, tmp_path: Path
) -> None:
    samples, (line,) = asked(tmp_path, text)

    assert samples == []
    assert told in line


def test_without_a_file_nothing_is_done(tmp_path: Path) -> None:
    lines: list[str] = []

    BurstDesk(tmp_path / "burst.json", lambda _: None, say=lines.append).look()

    assert lines == []

"""The checker on pipelines with known errors, so that a clean result is meaningful."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.checker import Oracle, check, content_hash, key_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.faults.checker import Key, Verdict

    Stored = list[tuple[Key, str]]
    Pipeline = Callable[["Oracle", "Stored"], None]

NUM_BATCHES = 5


def batch(seq: int) -> tuple[Key, str]:
    return key_of("run", 0, 0, seq), content_hash("rows of", seq)


def sound(oracle: Oracle, stored: Stored) -> None:
    for seq in range(NUM_BATCHES):
        key, content = batch(seq)
        oracle.attempt(key, content)
        stored.append((key, content))
        oracle.acknowledge(key)


def drops_one(oracle: Oracle, stored: Stored) -> None:
    sound(oracle, stored)
    del stored[2]


def doubles_one(oracle: Oracle, stored: Stored) -> None:
    sound(oracle, stored)
    stored.append(stored[1])


def flips_a_byte(oracle: Oracle, stored: Stored) -> None:
    sound(oracle, stored)
    key, content = stored[3]
    flipped = "0" if content[0] != "0" else "1"
    stored[3] = (key, flipped + content[1:])


def acknowledges_before_it_writes(oracle: Oracle, stored: Stored) -> None:
    sound(oracle, stored)
    key, content = batch(NUM_BATCHES)
    oracle.attempt(key, content)
    oracle.acknowledge(key)  # Killed here.


def reuses_a_number(oracle: Oracle, stored: Stored) -> None:
    sound(oracle, stored)
    key, _ = batch(0)
    oracle.attempt(key, content_hash("other rows"))
    oracle.acknowledge(key)


def makes_one_up(oracle: Oracle, stored: Stored) -> None:
    sound(oracle, stored)
    stored.append(batch(77))


def drops_one_it_never_acknowledged(oracle: Oracle, stored: Stored) -> None:
    sound(oracle, stored)
    oracle.attempt(*batch(NUM_BATCHES))


def run(pipeline: Pipeline, folder: Path, **account: int) -> Verdict:
    stored: Stored = []
    with Oracle(folder / "oracle") as oracle:
        pipeline(oracle, stored)
    return check(folder / "oracle", stored, **account)


def test_a_correct_pipeline_is_clean(tmp_path: Path) -> None:
    verdict = run(sound, tmp_path)

    assert verdict.is_clean
    assert (verdict.num_stored, verdict.num_recovered) == (5, 0)


@pytest.mark.parametrize(
    ("pipeline", "fault", "seq"),
    [
        (drops_one, "lost", 2),
        (doubles_one, "duplicated", 1),
        (flips_a_byte, "corrupt", 3),
        (acknowledges_before_it_writes, "lost", 5),
        (reuses_a_number, "corrupt", 0),
        (makes_one_up, "unexpected", 77),
    ],
)
def test_each_broken_pipeline_is_reported_with_its_broken_batch(
    tmp_path: Path, pipeline: Pipeline, fault: str, seq: int
) -> None:
    verdict = run(pipeline, tmp_path)

    assert not verdict.is_clean
    assert getattr(verdict, fault) == (("run", "0", "0", str(seq)),)


def test_missing_rows_without_a_drop_count_are_unaccounted_for(tmp_path: Path) -> None:
    assert run(drops_one_it_never_acknowledged, tmp_path).num_unaccounted == 1


@pytest.mark.parametrize("where", ["num_dropped", "num_buffered"])
def test_dropped_and_buffered_rows_are_accounted_for(tmp_path: Path, where: str) -> None:
    verdict = run(drops_one_it_never_acknowledged, tmp_path, **{where: 1})

    assert verdict.is_clean


def test_a_drop_count_above_the_missing_rows_is_unaccounted_for(tmp_path: Path) -> None:
    assert run(sound, tmp_path, num_dropped=1).num_unaccounted == -1


def test_a_row_stored_after_a_lost_acknowledgement_is_allowed(tmp_path: Path) -> None:
    def loses_an_acknowledgement(oracle: Oracle, stored: Stored) -> None:
        oracle.attempt(*batch(0))
        stored.append(batch(0))

    verdict = run(loses_an_acknowledgement, tmp_path)

    assert verdict.is_clean
    assert verdict.num_recovered == 1


def test_an_incomplete_line_of_a_killed_producer_is_ignored(tmp_path: Path) -> None:
    with Oracle(tmp_path / "oracle") as oracle:
        oracle.attempt(*batch(0))
    whole = (tmp_path / "oracle").read_bytes()
    (tmp_path / "oracle").write_bytes(whole + whole[:-5])

    assert check(tmp_path / "oracle", [batch(0)]).is_clean

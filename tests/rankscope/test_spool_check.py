from __future__ import annotations

import json
import struct
from runpy import run_path
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.collector.store.store import open_store
from rankscope.commands.check_spool import check_text
from rankscope.commands.import_trace import import_files
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.spool import HEADER_BYTES, RECORD_BYTES
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rankscope.analysis.report.report import RunReport

    Damage = Callable[[Path], None]

pytestmark = pytest.mark.slow

EXAMPLE = run_path(str(ROOT / "docs" / "spool_example.py"))
KIND, FLAGS, STEP, START, END, GROUP, SEQ = 1, 2, 8, 24, 32, 64, 72
FORWARD, DP, RECV, WAIT = (EXAMPLE[name] for name in ("FORWARD", "DP", "RECV", "WAIT"))
HAS_COMM = EXAMPLE["HAS_COMM"]


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    EXAMPLE["write_spool"](tmp_path / "spool")
    return tmp_path / "spool"


def folder_of(spool: Path, rank: int) -> Path:
    (found,) = (spool / "example").glob(f"e0-r{rank:05d}-*")
    return found


def change(spool: Path, edit: Callable[[bytearray, int], None], *, ranks: range = range(4)) -> None:
    """Edit each span record, given the segment and the record's offset."""
    for rank in ranks:
        path = folder_of(spool, rank) / "seg-000000.rsp"
        data = bytearray(path.read_bytes())
        for at in range(HEADER_BYTES, len(data), RECORD_BYTES):
            if data[at]:
                edit(data, at)
        path.write_bytes(data)


def change_kind(
    kind: int,
    edit: Callable[[bytearray, int], None],
    *,
    record_type: int = 1,
    ranks: range = range(4),
) -> Damage:
    """Return a damage of the records of one type and kind."""

    def edit_own(data: bytearray, at: int) -> None:
        if data[at] == record_type and data[at + KIND] == kind:
            edit(data, at)

    return lambda spool: change(spool, edit_own, ranks=ranks)


def set_field(kind: int, offset: int, form: str, value: int, *, ranks: range = range(4)) -> Damage:
    def edit(data: bytearray, at: int) -> None:
        struct.pack_into(form, data, at + offset, value)

    return change_kind(kind, edit, ranks=ranks)


def remove_flag(kind: int, flag: int) -> Damage:
    def edit(data: bytearray, at: int) -> None:
        (old,) = struct.unpack_from("<H", data, at + FLAGS)
        struct.pack_into("<H", data, at + FLAGS, old & ~flag)

    return change_kind(kind, edit)


def to_other(data: bytearray, at: int) -> None:
    """Make a record to a span of kind ``other``."""
    data[at : at + 2] = bytes((1, 14))
    struct.pack_into("<H", data, at + FLAGS, 16)


def drop_records(*, record_type: int = 1, kind: int, ranks: range = range(4)) -> Damage:
    return change_kind(kind, to_other, record_type=record_type, ranks=ranks)


def set_header(offset: int, form: str, value: int | bytes, files: str = "*.rsp") -> Damage:
    def damage(spool: Path) -> None:
        for path in spool.rglob(files):
            data = bytearray(path.read_bytes())
            struct.pack_into(form, data, offset, value)
            path.write_bytes(data)

    return damage


def empty_names(spool: Path) -> None:
    for path in spool.rglob("process.rsp"):
        data = path.read_bytes()
        path.write_bytes(data[:HEADER_BYTES] + bytes(len(data) - HEADER_BYTES))


def truncate(spool: Path) -> None:
    path = folder_of(spool, 1) / "seg-000000.rsp"
    path.write_bytes(path.read_bytes()[: HEADER_BYTES + 100 * RECORD_BYTES])


def truncate_unsealed(spool: Path) -> None:
    set_header(256, "<Q", 0, "seg-*.rsp")(spool)
    truncate(spool)


def swap_times(data: bytearray, at: int) -> None:
    start, end = struct.unpack_from("<qq", data, at + START)
    struct.pack_into("<qq", data, at + START, end, start)


def overlap(data: bytearray, at: int) -> None:
    (end,) = struct.unpack_from("<q", data, at + END)
    struct.pack_into("<q", data, at + END, end + 5_000_000)


RANK_3 = "e0-r00003-*/*.rsp"
other_host = set_header(80, "64s", b"second-host", RANK_3)
other_anchor = set_header(216, "<q", EXAMPLE["UNIX_NS"] + 10**9, RANK_3)


def other_clock(spool: Path) -> None:
    other_host(spool)
    other_anchor(spool)


def declared_clock_error(spool: Path) -> None:
    other_clock(spool)
    for rank in range(4):
        path = folder_of(spool, rank) / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "clock_error_ns": 10**9}))


def unix_steps(data: bytearray, at: int) -> None:
    if data[at] == 2:
        for offset in (START, END):
            (old,) = struct.unpack_from("<q", data, at + offset)
            value = old + EXAMPLE["UNIX_NS"] - EXAMPLE["MONOTONIC_NS"]
            struct.pack_into("<q", data, at + offset, value)


def remove(name: str, *ranks: int) -> Damage:
    def damage(spool: Path) -> None:
        for rank in ranks:
            (folder_of(spool, rank) / name).unlink()

    return damage


def two_members_of_one(spool: Path) -> None:
    path = folder_of(spool, 1) / "groups.jsonl"
    line = json.loads(path.read_text())
    path.write_text(json.dumps({**line, "members": [0, 1, 3]}) + "\n")


CASES: dict[str, tuple[Damage, str]] = {
    "p2p with group 0": (set_field(RECV, GROUP, "<Q", 0), "p2p-group"),
    "one end with group 0": (set_field(7, GROUP, "<Q", 0, ranks=range(1)), "p2p-group"),
    "p2p with another group": (set_field(RECV, GROUP, "<Q", 77), "one-sided"),
    "collective with group 0": (set_field(DP, GROUP, "<Q", 0), "no-group"),
    "collective without seq": (set_field(DP, SEQ, "<q", -1), "no-group"),
    "communication without flag": (remove_flag(DP, HAS_COMM), "no-group"),
    "wait without flag": (remove_flag(WAIT, HAS_COMM), "wait-flag"),
    "wait for another": (set_field(WAIT, SEQ, "<q", 900), "wait-unmatched"),
    "no wait": (drop_records(kind=WAIT), "no-wait"),
    "no group record": (remove("groups.jsonl", 0, 1, 2, 3), "no-group-record"),
    "group members differ": (two_members_of_one, "group-members"),
    "one-sided collective": (drop_records(kind=DP, ranks=range(1)), "one-sided"),
    "one-sided p2p": (drop_records(kind=RECV, ranks=range(2)), "one-sided"),
    "no step records": (drop_records(record_type=2, kind=0), "no-step-record"),
    "no step records of a rank": (
        drop_records(record_type=2, kind=0, ranks=range(1)),
        "no-step-record",
    ),
    "steps in Unix time": (lambda spool: change(spool, unix_steps), "step-clock"),
    "world size": (set_header(36, "<I", 4096), "world-size"),
    "no manifest": (remove("manifest.json", 2), "missing-file"),
    "no process file": (remove("process.rsp", 2), "missing-file"),
    "truncated": (truncate, "lost-rows"),
    "truncated while written": (truncate_unsealed, "lost-rows"),
    "empty name table": (empty_names, "names"),
    "overlap": (change_kind(FORWARD, overlap), "overlap"),
    "negative durations": (change_kind(FORWARD, swap_times), "invalid-record"),
    "several hosts": (other_host, "clock-error"),
    "clocks that differ": (other_clock, "clock-order"),
    "anchors of one host that differ": (other_anchor, "anchors"),
}


def test_the_example_has_no_problem_and_its_slow_rank_is_found(spool: Path, tmp_path: Path) -> None:
    text, has_errors = check_text(spool, run_id=None, as_json=False)
    assert (text, has_errors) == (f"{spool}: no problem found", False)

    report = imported(spool, tmp_path)

    top = report.findings[0]
    assert (top.cause, top.ranks, top.steps) == ("slow-compute", (2,), (4, 9))
    assert not report.quality.warnings


QUICK = ("p2p with group 0", "no wait", "no manifest", "overlap", "clocks that differ")
"""Defects that every run of the tests tries; `make nightly` tries all."""


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in CASES],
)
def test_each_defect_is_named(name: str, spool: Path) -> None:
    damage, what = CASES[name]
    damage(spool)

    text, has_errors = check_text(spool, run_id=None, as_json=True)

    problems = json.loads(text)["problems"]
    found = {problem["what"] for problem in problems}
    assert what in found, problems
    assert has_errors == any(problem["level"] == "error" for problem in problems)
    assert "\n" not in "".join(problem["found"] for problem in problems)


def test_a_job_that_ended_within_a_step_has_no_problem(spool: Path) -> None:
    def edit(data: bytearray, at: int) -> None:
        (step,) = struct.unpack_from("<i", data, at + STEP)
        is_recv_or_step = data[at] == 2 or data[at + KIND] == RECV
        if step == 9 and is_recv_or_step:
            data[at : at + 2] = bytes((1, 14))
            struct.pack_into("<HI", data, at + FLAGS, 16, 1)

    change(spool, edit)

    assert check_text(spool, run_id=None, as_json=False)[0] == f"{spool}: no problem found"


def test_one_member_records_its_group_for_all(spool: Path) -> None:
    remove("groups.jsonl", 0, 1)(spool)

    assert check_text(spool, run_id=None, as_json=False)[0] == f"{spool}: no problem found"


def test_a_spool_declares_the_error_between_its_hosts(spool: Path, tmp_path: Path) -> None:
    declared_clock_error(spool)

    assert check_text(spool, run_id=None, as_json=False)[0] == f"{spool}: no problem found"
    assert imported(spool, tmp_path).quality.clock_error_ns == 2 * 10**9


SAID = {
    "world size": "world size of 4,096",
    "truncated": "segments of the spool were cut",
    "truncated while written": "segments of the spool were cut",
    "empty name table": "have no name",
    "overlap": "overlap another on the same track",
    "negative durations": "ends before it begins",
    "no manifest": "manifest.json",
    "p2p with group 0": "group id 0",
    "collective with group 0": "no group or number",
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SAID)
def test_the_report_says_what_is_wrong_with_its_spool(
    name: str, spool: Path, tmp_path: Path
) -> None:
    damage, _ = CASES[name]
    damage(spool)
    report = imported(spool, tmp_path)
    assert SAID[name] in " ".join((*report.quality.warnings, report.findings[0].evidence))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("no manifest", "manifest.json is missing"),
        pytest.param("no process file", "process.rsp is missing", marks=pytest.mark.nightly),
        ("truncated", "is shorter than its header says"),
    ],
)
def test_import_says_what_it_could_not_read(
    name: str, line: str, spool: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CASES[name][0](spool)
    imported(spool, tmp_path)
    assert line in capsys.readouterr().err


def imported(spool: Path, tmp_path: Path) -> RunReport:
    url = f"chdb://{tmp_path}/store"
    import_files([spool], file_format="rankscope", run_id=None, meta=None, store_url=url)
    with open_store(url) as store:
        return analyze_run(StoreSource(store), "example")


def test_problems_of_one_kind_are_counted_beyond_the_first_few(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / "run" / f"process-{number}").mkdir(parents=True)

    text, has_errors = check_text(tmp_path, run_id=None, as_json=False)

    assert has_errors
    assert text.count("process.rsp is missing") == 5
    assert "error missing-file: 3 more (`check-spool --json` has all)" in text
    assert text.endswith(": 8 errors, 0 warnings")

"""Hostile files for every option and argument of the commands: each is refused in one line.

One process reads them all, and its memory is measured. Most files are given to the function that
reads them, some to the whole command, which opens a store first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.support.collector.hostile_files import archives, arrow_file, parquets, pickles

if TYPE_CHECKING:
    from pathlib import Path

MEBIBYTE = 1 << 20
TIMEOUT_S = 240.0
"""For all files, on a busy machine; no file may block a command."""

PROGRAM = """
import contextlib, io, json, os, pathlib, resource, sys, time
from rankscope.__main__ import main
from rankscope.errors import find_exit_code, format_error
from rankscope.server.topology import read_topology
from rankscope.sources.bytedance_file import what_if_file

READERS = {"what-if": what_if_file, "topology": read_topology}

def command(arguments):
    if arguments[0] not in READERS:
        sys.argv = ["rankscope", *arguments]
        return main()
    try:
        READERS[arguments[0]](*map(pathlib.Path, arguments[1:]))
    except Exception as error:
        print("rankscope:", format_error(error), file=sys.stderr)
        return find_exit_code(error)

def peak_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def outcome(arguments, environment):
    os.environ.update(environment)
    out, err, status, raised = io.StringIO(), io.StringIO(), None, ""
    began = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = command(arguments)
        except BaseException as error:
            raised = repr(error)[:500]
    for name in environment:
        del os.environ[name]
    return [status, err.getvalue(), raised, peak_kib(), time.process_time() - began]

cases = json.load(sys.stdin)
first = [outcome(*case) for case in cases[:1]]
before = peak_kib()
rest = [outcome(*case) for case in cases[1:]]
json.dump([before, first + rest], sys.stdout)
"""

BY_COMMAND = ("parquet-page-bomb", "fifo", "endless")

SOUND_META = dict.fromkeys(("dp_size", "dsp_size", "pp_size", "tp_size", "vpp_size"), 1)
META = json.dumps(SOUND_META | {"world_size": 1})

LAUGHS = "a0: &a0 [1]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 10)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{level}: &a{level}\n  <<: [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 10)
)
DEEP = "[" * 50_000
DIGITS = "9" * 50_000

TEXTS = {
    "yaml": {
        "laughs": LAUGHS + "dp_size: *a9\n",
        "merges": MERGES,
        "deep": DEEP,
        "dashes": "- " * 20_000,
        "digits": META.replace("1}", DIGITS + "}"),
        "hex": "dp_size: 0x" + "f" * 50_000,
        "sixty": "dp_size: " + "1:" * 20_000 + "1",
        "day": "dp_size: 2001-99-99",
        "runs": "dp_size: !!python/object/apply:os.system ['touch {marker}']",
        "zero-bytes": "\0" * 100,
    },
    "toml": {
        "deep": "a = " + DEEP,
        "digits": "seed = " + DIGITS,
        "dots": "a." * 20_000 + "a = 1",
        "quoted": "'='." * 20_000 + "a = 1",
    },
    "json": {"deep": DEEP, "digits": DIGITS, "not-a-number": "NaN", "text": '"' + "x" * 100_000},
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Outcome of a command."""

    status: int | None
    line: str
    raised: str
    peak_bytes: int
    took_s: float
    """CPU time."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    folder: Path
    marker: Path
    before: set[str]
    """Paths in the folder before the commands ran."""

    warm_bytes: int
    answers: dict[str, Answer]


def hostile(folder: Path, marker: Path) -> dict[str, Path]:
    """Create files that are hostile for every reader; return them by name."""
    found: dict[str, Path] = {}
    contents = pickles(marker) | archives() | parquets() | {"arrow": arrow_file()}
    for name, content in contents.items():
        found[name] = folder / name
        found[name].write_bytes(content)
    found |= {"device": folder / "device", "fifo": folder / "fifo", "endless": folder / "endless"}
    found |= {"folder": folder / "folder", "loop": folder / "loop", "none": folder / "none"}
    for path in found.values():
        if path.exists():
            path.chmod(0o600)  # otherwise a file of tokens is not read
    found["device"].symlink_to("/dev/zero")
    os.mkfifo(found["fifo"])
    with found["endless"].open("wb") as file:
        file.truncate(1 << 40)  # a terabyte, without using the disk
    found["folder"].mkdir()
    found["loop"].symlink_to(found["loop"])
    return found


def with_ending(path: Path, ending: str) -> str:
    """Return a link to a file whose name ends as its format needs."""
    link = path.with_name(f"{path.name}.{ending}")
    if not link.is_symlink():
        link.symlink_to(path.name)
    return str(link)


def importing(source: str, *arguments: str) -> list[str]:
    return ["import", "--format", source, "--run", "r", *arguments]


def commands(folder: Path, files: dict[str, Path]) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return the command lines by argument and file, with their environment."""
    store = f"chdb://{folder / 'store'}"
    meta = folder / "sound.yaml"
    meta.write_text(META)
    stored = ["--store", store]
    serving = ["serve", "--store", store]
    certified = [*serving, "--tls-key", str(folder / "key.pem"), "--tls-cert"]
    (folder / "key.pem").write_text("no key")
    (folder / "key.pem").chmod(0o600)
    found: dict[str, tuple[list[str], dict[str, str]]] = {}
    for name, path in files.items():
        found |= {
            f"trace {name}": (["what-if", str(path), str(meta)], {}),
            f"meta {name}": (["what-if", str(files["arrow"]), str(path)], {}),
            f"topology {name}": (["topology", str(path)], {}),
            f"kineto {name}": (importing("kineto", with_ending(path, "json"), *stored), {}),
            f"chrome {name}": (importing("chrome", with_ending(path, "json"), *stored), {}),
            f"kineto packed {name}": (
                importing("kineto", with_ending(path, "json.gz"), *stored),
                {},
            ),
            f"dump {name}": (
                importing("flight-recorder", with_ending(path, "0.json"), *stored),
                {},
            ),
            f"nccl-ras {name}": (importing("nccl-ras", str(path), *stored), {}),
            f"nccl-inspector {name}": (importing("nccl-inspector", str(path), *stored), {}),
            f"scenario {name}": (["simulate", with_ending(path, "toml"), "--run", "r"], {}),
            f"tokens {name}": (["token", "list"], {"RANKSCOPE_TOKENS": str(path)}),
            f"certificate {name}": ([*certified, str(path)], {}),
        }
    for name in BY_COMMAND:
        line = importing("bytedance", str(files[name]), "--meta", str(meta), *stored)
        found[f"import {name}"] = (line, {})
    found["serve fifo"] = ([*serving, "--topology", str(files["fifo"])], {})
    found.pop("tokens none")  # no file: no tokens
    return found


def texts(folder: Path, marker: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return command lines with texts that are hostile to the parsers of their formats."""
    found: dict[str, tuple[list[str], dict[str, str]]] = {}
    for ending, contents in TEXTS.items():
        for name, text in contents.items():
            path = folder / f"text-{name}.{ending}"
            path.write_text(text.replace("{marker}", str(marker)))
            if ending == "yaml":
                found[f"meta text {name}"] = (["what-if", "trace", str(path)], {})
            else:
                found[f"topology {ending} {name}"] = (["topology", str(path)], {})
                for source in ("kineto", "chrome", "nccl-ras", "nccl-inspector"):
                    found[f"{source} {ending} {name}"] = (importing(source, str(path)), {})
                dump = importing("flight-recorder", with_ending(path, "0"))
                found[f"dump {ending} {name}"] = (dump, {})
                found[f"scenario {ending} {name}"] = (["simulate", str(path), "--run", "r"], {})
    return found


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("hostile") / "inner" / "files"
    folder.mkdir(parents=True)
    marker = folder / "executed"
    files = hostile(folder, marker)
    cases = commands(folder, files) | texts(folder, marker)
    # The first command loads all libraries and the store: memory is counted after it.
    commands_run = [cases["import parquet-page-bomb"], *cases.values()]
    before = {str(path) for path in folder.parent.parent.rglob("*") if "store" not in path.parts}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(commands_run),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    warm_kib, found = json.loads(done.stdout)
    answers = {
        name: Answer(status=status, line=err, raised=raised, peak_bytes=kib * 1024, took_s=took_s)
        for name, (status, err, raised, kib, took_s) in zip(cases, found[1:], strict=True)
    }
    return Outcome(
        folder=folder, marker=marker, before=before, warm_bytes=warm_kib * 1024, answers=answers
    )


@pytest.mark.slow
def test_every_hostile_file_is_refused_in_one_line_with_status_2(outcome: Outcome) -> None:
    wrong = {
        name: answer
        for name, answer in outcome.answers.items()
        if answer.status != 2
        or answer.raised
        or answer.line.count("\n") != 1
        or not answer.line.startswith("rankscope: ")
        or not answer.line[:-1].isprintable()
        or len(answer.line) > 1000
    }

    assert not wrong
    assert len(outcome.answers) > 150


@pytest.mark.slow
def test_no_hostile_file_runs_code_or_writes_elsewhere(outcome: Outcome) -> None:
    root = outcome.folder.parent.parent
    after = {str(path) for path in root.rglob("*") if "store" not in path.parts}

    assert not outcome.marker.exists()
    assert after == outcome.before


@pytest.mark.slow
def test_no_hostile_file_takes_much_memory_or_time(outcome: Outcome) -> None:
    most = max(outcome.answers.values(), key=lambda answer: answer.peak_bytes)
    slowest = max(outcome.answers.values(), key=lambda answer: answer.took_s)

    assert most.peak_bytes - outcome.warm_bytes <= 128 * MEBIBYTE, most
    assert slowest.took_s < 20, slowest

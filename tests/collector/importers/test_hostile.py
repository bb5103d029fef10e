"""Every file that a command is given may be another than it says: each is refused in one line.

One process reads them all, and its memory is watched. Most doors are tried where the file is
read, and some by the whole command, which opens a store first.
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
LONGEST_S = 240.0
"""For all of them, on a machine that stands still for a while; none may wait for anybody."""

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

def told(arguments, environment):
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
first = [told(*case) for case in cases[:1]]
before = peak_kib()
rest = [told(*case) for case in cases[1:]]
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
class Told:
    """What the command said of it."""

    status: int | None
    line: str
    raised: str
    peak_bytes: int
    took_s: float
    """Of a processor."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    folder: Path
    marker: Path
    before: set[str]
    """Names in the folder before."""

    warm_bytes: int
    told: dict[str, Told]


def hostile(folder: Path, marker: Path) -> dict[str, Path]:
    """Make the files that are hostile at any door; return them by name."""
    found: dict[str, Path] = {}
    contents = pickles(marker) | archives() | parquets() | {"arrow": arrow_file()}
    for name, content in contents.items():
        found[name] = folder / name
        found[name].write_bytes(content)
    found |= {"device": folder / "device", "fifo": folder / "fifo", "endless": folder / "endless"}
    found |= {"folder": folder / "folder", "loop": folder / "loop", "none": folder / "none"}
    for path in found.values():
        if path.exists():
            path.chmod(0o600)  # a file of tokens is read then
    found["device"].symlink_to("/dev/zero")
    os.mkfifo(found["fifo"])
    with found["endless"].open("wb") as file:
        file.truncate(1 << 40)  # a terabyte that takes no room
    found["folder"].mkdir()
    found["loop"].symlink_to(found["loop"])
    return found


def with_ending(path: Path, ending: str) -> str:
    """Return a link to a file by which its format is told from its name."""
    link = path.with_name(f"{path.name}.{ending}")
    if not link.is_symlink():
        link.symlink_to(path.name)
    return str(link)


def commands(folder: Path, files: dict[str, Path]) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return the command lines by door and file, with their environment."""
    store = f"chdb://{folder / 'store'}"
    meta = folder / "sound.yaml"
    meta.write_text(META)
    importing = ["import", "--format", "bytedance", "--run", "r", "--store", store]
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
            f"scenario {name}": (["simulate", with_ending(path, "toml"), "--run", "r"], {}),
            f"tokens {name}": (["token", "list"], {"RANKSCOPE_TOKENS": str(path)}),
            f"certificate {name}": ([*certified, str(path)], {}),
        }
    for name in BY_COMMAND:
        path = files[name]
        found[f"import {name}"] = ([*importing, str(path), "--meta", str(meta)], {})
    found["serve fifo"] = ([*serving, "--topology", str(files["fifo"])], {})
    found.pop("tokens none")  # no file: no tokens
    return found


def texts(folder: Path, marker: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Return command lines with texts that are hostile to the parser of their format."""
    found: dict[str, tuple[list[str], dict[str, str]]] = {}
    for ending, contents in TEXTS.items():
        for name, text in contents.items():
            path = folder / f"text-{name}.{ending}"
            path.write_text(text.replace("{marker}", str(marker)))
            if ending == "yaml":
                found[f"meta text {name}"] = (["what-if", "trace", str(path)], {})
            else:
                found[f"topology {ending} {name}"] = (["topology", str(path)], {})
                found[f"scenario {ending} {name}"] = (["simulate", str(path), "--run", "r"], {})
    return found


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("hostile") / "inner" / "files"
    folder.mkdir(parents=True)
    marker = folder / "executed"
    files = hostile(folder, marker)
    cases = commands(folder, files) | texts(folder, marker)
    # The first loads what there is to load, the store too: memory counts from there.
    asked = [cases["import parquet-page-bomb"], *cases.values()]
    before = {str(path) for path in folder.parent.parent.rglob("*") if "store" not in path.parts}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=True,
    )
    warm_kib, answers = json.loads(done.stdout)
    told = {
        name: Told(status=status, line=err, raised=raised, peak_bytes=kib * 1024, took_s=took_s)
        for name, (status, err, raised, kib, took_s) in zip(cases, answers[1:], strict=True)
    }
    return Outcome(
        folder=folder, marker=marker, before=before, warm_bytes=warm_kib * 1024, told=told
    )


def test_each_is_refused_in_one_plain_line_with_status_2(outcome: Outcome) -> None:
    wrong = {
        name: told
        for name, told in outcome.told.items()
        if told.status != 2
        or told.raised
        or told.line.count("\n") != 1
        or not told.line.startswith("rankscope: ")
        or not told.line[:-1].isprintable()
        or len(told.line) > 1000
    }

    assert not wrong
    assert len(outcome.told) > 150


def test_none_of_them_ran_anything_or_wrote_outside(outcome: Outcome) -> None:
    root = outcome.folder.parent.parent
    after = {str(path) for path in root.rglob("*") if "store" not in path.parts}

    assert not outcome.marker.exists()
    assert after == outcome.before


def test_none_of_them_took_memory_or_time(outcome: Outcome) -> None:
    most = max(outcome.told.values(), key=lambda told: told.peak_bytes)
    slowest = max(outcome.told.values(), key=lambda told: told.took_s)

    assert most.peak_bytes - outcome.warm_bytes <= 128 * MEBIBYTE, most
    assert slowest.took_s < 20, slowest

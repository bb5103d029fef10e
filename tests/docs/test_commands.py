"""Each command that a document shows runs, or a table says why it can't run here.

Commands run in the order of their pages, each once, in one folder with one store, which has a
simulated run. Also of those that don't run, the command line must know what `rankscope` is passed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from typing import TYPE_CHECKING

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from rankscope.commands.app import app
from rankscope.commands.simulate import simulate_run
from rankscope.simulation import SimulateOptions
from tests.support.collector.spool_builder import SpoolBuilder
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGES = sorted(
    path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = {"sh", "bash"}

CANNOT_RUN = {
    r"(\S*/)?pip install|python3? -m (pip|build|twine|venv) ?|jupyter |empty/bin/python": (
        "installs or needs other packages: `make floors`, tests/integration/test_wheel.py"
    ),
    r"make |git ": "is the suite itself, a training of minutes, or changes this checkout",
    r"torchrun |OMP_NUM_THREADS=1 .*torchrun ": "trains: tests/tracer, tests/rankscope/demo",
    r"ssh |rsync |curl ": "needs another host, or a server",
    r"docker |helm |kubectl |deploy/prepare.sh": "needs containers: .github/workflows",
    r"srun |sbatch |scontrol ": "needs Slurm: tests/deploy runs the scripts",
    r"systemctl |install -": "needs root",
    r"rankscope (serve|agent|run) ": "runs until it is stopped: tests/integration starts them",
    r"rankscope serve$": "runs until it is stopped",
    r"rankscope import .*--format (kineto|bytedance|flight-recorder|nccl)": (
        "needs files of other programs: tests/collector/importers"
    ),
    r"rankscope log |export WANDB": "needs the packages of trackers: `make trackers`",
    r"rankscope analyze (AR|NAME)": "analyses what such a file has",
    r"rankscope doctor": "judges this machine: tests/rankscope/doctor",
    r"rankscope token revoke ID": "needs the id of a token: test_token.py",
    r"python -m rankscope.tracer --running": "imports torch: tests/tracer/job",
    r"rm -r SPOOL": "deletes",
}
"""Commands that don't run here, by a pattern of their begin, and why."""

RUN_BY = {"docs/tutorial.md": "tests/integration/test_tutorial.py"}
"""Pages whose commands another test runs, to the letter."""

REPLACED_BY = {
    "RUN": "tuesday",
    "llama-7": "tuesday",
    "RANK": "2",
    "HOST": "sim-00000",
    "SPOOL/tuesday": "spool/llama-7",
    "$RANKSCOPE_TRACE": "spool",
    "2048": "16",
    "12288": "64",
}
"""Names of the documents, and sizes that take minutes, with what is used here."""


def shown(page: str) -> list[str]:
    """Return the commands of a page, each on one line, without comments."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = [
        line
        for language, fence in FENCE.findall(text)
        if language in SHELL
        for line in fence.replace("\\\n", " ").splitlines()
    ]
    consoles = [fence for language, fence in FENCE.findall(text) if language == "console"]
    lines += re.findall(r"^\$ (.*)$", "\n".join(consoles), re.MULTILINE)
    bare = (re.sub(r"(^|\s+)# .*$", "", line).strip() for line in lines)
    return [re.sub(r"\s+", " ", line) for line in bare if line]


def without_settings(command: str) -> str:
    """Return a command without variables in front of it."""
    return re.sub(r"^(\w+=\S+ )+", "", command)


def why_not(command: str) -> str | None:
    """Return the pattern of `CANNOT_RUN` that a command begins with; None if it is to run."""
    return next((one for one in CANNOT_RUN if re.match(one, without_settings(command))), None)


def given_to_rankscope(command: str) -> list[list[str]]:
    """Return the arguments of each call of `rankscope` in a command."""
    lexer = shlex.shlex(re.sub(r"\$\(|\)", " ; ", command), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    calls: list[list[str]] = []
    is_inside, before = False, ""
    for word in lexer:
        if word == "rankscope" and not before.startswith("--"):
            calls.append([])
            is_inside = True
        elif set(word) <= set(lexer.punctuation_chars):
            is_inside = False
        elif is_inside:
            calls[-1].append(word)
        before = word
    return [call for call in calls if call]


HAVE_RUN: set[str] = set()
COMMANDS = [(page, command) for page in PAGES for command in shown(page)]
CALLS = [
    (page, arguments)
    for page, command in COMMANDS
    if not re.match(r"docker|helm|kubectl", command)
    for arguments in given_to_rankscope(command)
]


@pytest.mark.parametrize("page", PAGES)
def test_each_block_says_what_it_is(page: str) -> None:
    fences = re.findall(r"^ *```(\w*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)

    assert all(fences[::2])


@pytest.mark.parametrize(
    ("page", "arguments"), CALLS, ids=[f"{page} {' '.join(words)[:50]}" for page, words in CALLS]
)
def test_the_command_line_knows_what_a_document_passes(page: str, arguments: list[str]) -> None:
    command = get_command(app)
    while isinstance(command, TyperGroup) and arguments and arguments[0] in command.commands:
        command, arguments = command.commands[arguments[0]], arguments[1:]
    context = command.context_class(command, info_name=command.name, **command.context_settings)
    given, rest, _ = command.make_parser(context).parse_args(list(arguments))

    required = [one.name for one in command.params if one.required and one.name not in given]
    assert not required, page
    assert not rest or command.allow_extra_args, page


def test_each_reason_is_needed() -> None:
    used = {why_not(command) for _, command in COMMANDS}

    assert set(CANNOT_RUN) <= used
    assert all((ROOT / test).is_file() for page, test in RUN_BY.items() if page in PAGES)
    assert len([command for _, command in COMMANDS if why_not(command) is None]) >= 25


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a working folder with a spool, whose home has a store with the run ``tuesday``."""
    folder = tmp_path_factory.mktemp("commands")
    scenario = re.search(r"```toml\n(.*?)```", (ROOT / "docs/simulator.md").read_text(), re.DOTALL)
    assert scenario
    small = re.sub(r"(?m)^((dp|pp|tp|num_microbatches) = ).*$", r"\g<1>2", scenario[1])
    (folder / "scenario.toml").write_text(small.replace("num_steps = 30", "num_steps = 12"))
    builder = SpoolBuilder(folder / "spool", run_id="llama-7", world_size=1)
    builder.span("forward", start_ns=5)
    builder.step(0, start_ns=0, duration_ns=100)
    builder.end()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HOME", str(folder))
        patch.setenv("PWD", str(folder))
        for name in ("RANKSCOPE_STORE", "RANKSCOPE_TOKENS", "XDG_DATA_HOME"):
            patch.delenv(name, raising=False)
        simulate_run(
            SimulateOptions(
                scenario="healthy",
                run_id="tuesday",
                num_ranks=8,
                num_steps=13,
                seed=3,
                faults=("slow-compute:rank=2,factor=1.6,steps=6-12",),
            )
        )
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if page not in RUN_BY and any(why_not(one) is None for one in shown(page))
    ],
)
def test_the_commands_of_a_page_run(
    page: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for token in folder.glob("*.token"):  # each page makes its own
        token.unlink()
    for written in shown(page):
        if why_not(written) is not None or written in HAVE_RUN:
            continue
        HAVE_RUN.add(written)
        command = written
        for name, value in REPLACED_BY.items():
            command = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", value, command)
        settings = dict(re.findall(r"(?:export |(?<!\S))([A-Z_]+)=(\S+)", command))
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        bare = without_settings(command)
        if bare.startswith("rankscope "):
            arguments = [os.path.expandvars(one) for one in shlex.split(bare)[1:]]
            done = CliRunner().invoke(app, arguments)
            assert done.exit_code == 0, (command, done.output, done.exception)
        else:
            subprocess.run(["bash", "-ec", bare], cwd=folder, check=True, timeout=60)

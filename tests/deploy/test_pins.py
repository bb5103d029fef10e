"""Pins of all dependencies by version, and of the server's image by hash. Needs no network."""

from __future__ import annotations

import platform
import re
import tomllib
from importlib.metadata import PackageNotFoundError, version

import pytest
from packaging.requirements import Requirement

from deploy.pin_image import IMAGES, closure, pins
from tests.support.paths import ROOT

EXTRAS = ("embedded", "alerts", "trainer", "notebook", "dev")
"""Extras that `make` installs. ``audit`` has its own environment."""

on_the_pins_platform = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="what needs what is read off another platform's files"
)

PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([0-9][A-Za-z0-9.]*)")
HASHED = re.compile(r"([a-z0-9-]+)==([0-9][A-Za-z0-9.]*)((?: --hash=sha256:[0-9a-f]{64})+)")
OF_TORCH = re.compile(r"nvidia-(?!ml-py)|cuda-|triton")
"""Libraries that torch's build for NVIDIA devices pins itself, by ``==``."""


def lines_of(path: str) -> list[str]:
    text = (ROOT / path).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_every_line_of_the_constraints_pins_one_version_once() -> None:
    lines = lines_of("constraints.txt")

    assert not [line for line in lines if not PIN.fullmatch(line)]
    assert len(pins()) == len(lines)


@on_the_pins_platform
def test_the_constraints_have_all_that_the_extras_need_and_nothing_else() -> None:
    needed = {name for name in closure(EXTRAS) if not OF_TORCH.match(name)}
    pinned = set(pins())

    assert not needed - pinned, "unpinned"
    assert not pinned - needed, "stale"


@on_the_pins_platform
def test_the_installed_versions_are_the_pinned_ones() -> None:
    wrong = {}
    for name, pinned in pins().items():
        try:
            found = version(name).partition("+")[0]
        except PackageNotFoundError:
            found = "missing"
        if found != pinned:
            wrong[name] = (found, pinned)

    assert not wrong


@on_the_pins_platform
@pytest.mark.parametrize("file", IMAGES)
def test_an_image_installs_the_pinned_closure_of_its_extras_by_hashes_alone(file: str) -> None:
    found = [HASHED.fullmatch(line) for line in lines_of(f"deploy/{file}")]

    assert all(found)
    versions = {match[1]: match[2] for match in found if match}
    assert len(versions) == len(found)
    assert versions == {name: pins()[name] for name in closure(IMAGES[file])}
    assert not {"torch", "chdb", "pandas"} & versions.keys()
    assert ("dash" in versions) == (file == "requirements.txt")
    hashes = [text for match in found if match for text in match[3].split()]
    assert len(hashes) == len(set(hashes))


def test_the_image_installs_no_file_without_a_hash_and_builds_nothing_from_the_index() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    (built,) = (line for line in dockerfile.splitlines() if "pip wheel" in line)
    installs = [line for line in dockerfile.splitlines() if "pip install" in line]

    assert len(installs) == 3
    for flag in ("--require-hashes", "--only-binary :all:", "--no-deps"):
        assert flag in installs[0]
        assert flag in installs[2]
    for flag in ("--no-index", "--no-deps", "--no-build-isolation"):
        assert flag in installs[1]
        assert flag in built


def test_the_auditor_is_pinned_in_an_extra_of_its_own() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    (asked,) = map(Requirement, project["optional-dependencies"]["audit"])
    assert asked.name == "pip-audit"
    assert PIN.fullmatch(str(asked))


@pytest.mark.parametrize("line", ["h11>=0.16", "h11", "h11==0.16.*", "h11 @ file:///x", "-e ."])
def test_a_line_that_leaves_a_choice_is_not_a_pin(line: str) -> None:
    assert not PIN.fullmatch(line)

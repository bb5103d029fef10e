"""Write deploy/requirements.txt: what the server's image installs, each file by its hash.

    python -m deploy.pin_image          (asks the package index; needs the network)

Which distributions these are is read off the installed environment, their versions off
constraints.txt, and the hashes off the index, for both processors that the image is built for.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "deploy" / "requirements.txt"
PYTHON = "3.11"
"""The image's."""

GLIBC_MINORS = range(5, 37)
"""Of the image's glibc, 2.36, and the older ones whose wheels it takes."""

PROCESSORS = ("x86_64", "aarch64")
HEADER = """\
# What the server's image installs: every file by its hash, and no other is taken.
# Written by deploy/pin_image.py from constraints.txt; tests/deploy/test_pins.py compares them.
"""


def closure(extras: tuple[str, ...]) -> frozenset[NormalizedName]:
    """Return the distributions that some extras of ours need, and those that these need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [
        Requirement(text) for name in extras for text in project["optional-dependencies"][name]
    ]
    seen: set[tuple[NormalizedName, frozenset[str]]] = set()
    while asked:
        requirement = asked.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        for text in distribution(requirement.name).requires or ():
            needed = Requirement(text)
            marker = needed.marker
            wanted = ("", *requirement.extras)
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in wanted):
                asked.append(needed)
    return frozenset(name for name, _ in seen)


def pins() -> dict[NormalizedName, str]:
    """Return the versions that constraints.txt pins."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    return {
        canonicalize_name(name): version for name, _, version in (x.partition("==") for x in lines)
    }


def hashes(requirements: list[str], processor: str) -> dict[NormalizedName, str]:
    """Return the SHA-256 of the file that pip would install of each, as the index says it."""
    platforms = [f"manylinux_2_{minor}_{processor}" for minor in GLIBC_MINORS]
    platforms += [f"manylinux{year}_{processor}" for year in ("1", "2010", "2014")]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--quiet", "--no-deps", "--only-binary", ":all:", "--python-version", PYTHON]
    command += ["--target", "unused", "--report", "-"]
    command += [word for platform in platforms for word in ("--platform", platform)]
    told = subprocess.run([*command, *requirements], stdout=subprocess.PIPE, check=True).stdout  # noqa: S603  # our own interpreter
    return {
        canonicalize_name(item["metadata"]["name"]): item["download_info"]["archive_info"][
            "hashes"
        ]["sha256"]
        for item in json.loads(told)["install"]
    }


def main() -> None:
    """Write the file."""
    versions = pins()
    names = sorted(closure(("server",)))
    requirements = [f"{name}=={versions[name]}" for name in names]
    found = [hashes(requirements, processor) for processor in PROCESSORS]
    lines = [
        " ".join(
            [requirement, *(f"--hash=sha256:{text}" for text in sorted({f[name] for f in found}))]
        )
        for name, requirement in zip(names, requirements, strict=True)
    ]
    TARGET.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

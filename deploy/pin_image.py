"""Write deploy/requirements.txt: the dependencies of the server's image with their hashes.

    python -m deploy.pin_image          (needs the network)

The distributions are read from the installed environment, their versions from constraints.txt, and
the hashes from the package index, for both processors of the image. pip-compile and ``uv export``
would write the hashes of all files of a version; this writes one per processor.
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
"""Python version of the image."""

GLIBC_MINORS = range(5, 37)
"""Minor versions of glibc whose wheels the image (2.36) accepts."""

PROCESSORS = ("x86_64", "aarch64")
HEADER = """\
# Dependencies of the server's image, with the hashes of the only files that are accepted.
# Written by deploy/pin_image.py from constraints.txt; tests/deploy/test_pins.py compares them.
"""


def closure(extras: tuple[str, ...]) -> frozenset[NormalizedName]:
    """Return the distributions that some of our extras need, with all their dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [Requirement(f"{project['name']}[{','.join(extras)}]")]
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
    return frozenset(name for name, _ in seen) - {canonicalize_name(project["name"])}


def pins() -> dict[NormalizedName, str]:
    """Return the versions pinned in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    return {
        canonicalize_name(name): version for name, _, version in (x.partition("==") for x in lines)
    }


def hashes(requirements: list[str], processor: str) -> dict[NormalizedName, str]:
    """Return the SHA-256 of the file that pip would install, for each distribution."""
    platforms = [f"manylinux_2_{minor}_{processor}" for minor in GLIBC_MINORS]
    platforms += [f"manylinux{year}_{processor}" for year in ("1", "2010", "2014")]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--quiet", "--no-deps", "--only-binary", ":all:", "--python-version", PYTHON]
    command += ["--target", "unused", "--report", "-"]
    command += [word for platform in platforms for word in ("--platform", platform)]
    report = subprocess.run([*command, *requirements], stdout=subprocess.PIPE, check=True).stdout  # noqa: S603  # our own interpreter
    return {
        canonicalize_name(item["metadata"]["name"]): item["download_info"]["archive_info"][
            "hashes"
        ]["sha256"]
        for item in json.loads(report)["install"]
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

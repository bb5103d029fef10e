"""Write the dependencies of the images with their hashes: deploy/requirements*.txt.

    python -m deploy.pin_image          (needs the network)

The distributions are read from the installed environment, their versions from constraints.txt, and
the hashes from the package index, for both processors of the images. pip-compile and ``uv export``
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
IMAGES = {
    "requirements-agent.txt": ("agent",),
    "requirements.txt": ("server", "alerts"),
}
"""Extras that an image installs, by its file in deploy/."""

PYTHON = "3.11"
"""Python version of the image."""

GLIBC_MINORS = range(5, 37)
"""Minor versions of glibc whose wheels the image (2.36) accepts."""

PROCESSORS = ("x86_64", "aarch64")
HEADER = """\
# Dependencies of an image, with the hashes of the only files that are accepted.
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
        extras_of_ours = project["optional-dependencies"]
        texts = (
            [text for extra in requirement.extras for text in extras_of_ours[extra]]
            if requirement.name == project["name"]
            else distribution(requirement.name).requires
        )
        for text in texts or ():
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
    """Write the files."""
    versions = pins()
    needed = {file: sorted(closure(extras)) for file, extras in IMAGES.items()}
    requirements = {
        name: f"{name}=={versions[name]}" for names in needed.values() for name in names
    }
    by_processor = [hashes([*requirements.values()], processor) for processor in PROCESSORS]
    for file, names in needed.items():
        lines = [
            " ".join(
                [
                    requirements[name],
                    *(
                        f"--hash=sha256:{text}"
                        for text in sorted({of[name] for of in by_processor})
                    ),
                ]
            )
            for name in names
        ]
        text = HEADER + "\n".join(lines) + "\n"
        (ROOT / "deploy" / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

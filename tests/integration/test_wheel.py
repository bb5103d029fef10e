"""The installed wheel beside modules of the user that have the names of our folders."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from tests.support.missing_tools import skip_for_missing
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.nightly

BUILD_TIMEOUT_S = 280
SOURCES = ("pyproject.toml", "docs/package.md", "LICENSE", "src")
FOLDERS = ("analysis", "collector", "dashboard", "notebooks", "tracer", "trainer")
BUILT = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
"""Build products of the checkout, which must not get into the wheel."""

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir")


def run(*command: str, folder: Path, path: Path | None = None) -> str:
    """Run a command that must succeed, with ``path`` as the only extra folder of modules."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["PYTHONNOUSERSITE"] = "1"
    if path is not None:
        environ["PYTHONPATH"] = str(path)
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, because setuptools writes into the folder it builds from."""
    if find_spec("setuptools") is None:
        skip_for_missing("setuptools is not installed: pip install 'setuptools>=77'")
    if find_spec("pip") is None:
        skip_for_missing("pip is not installed: python -m ensurepip")
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=BUILT)
        else:
            (source / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=BUILT)
    wheels = tmp_path_factory.mktemp("wheels")
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(wheels))
    run(*PIP, "wheel", *options, str(source), folder=source)
    (built,) = wheels.glob("rankscope-*.whl")
    return built


def install(wheel: Path, target: Path) -> None:
    run(
        *(*PIP, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)),
        folder=target.parent,
    )


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of modules that holds the installed wheel."""
    target = tmp_path_factory.mktemp("installed") / "site"
    install(wheel, target)
    return target


def test_the_wheel_installs_one_package_with_the_compiled_part(installed: Path) -> None:
    packages = [entry.name for entry in installed.iterdir() if entry.is_dir()]

    assert sorted(name for name in packages if not name.endswith(".dist-info")) == [
        "bin",
        "rankscope",
    ]
    assert all((installed / "rankscope" / name / "__init__.py").is_file() for name in FOLDERS)
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        skip_for_missing("there is no C compiler: the wheel has no compiled part")
    code = "from rankscope.tracer.native import choice; print(choice.IS_COMPILED, choice.__file__)"
    is_compiled, file = run(
        sys.executable, "-S", "-c", code, folder=installed.parent, path=installed
    ).split()
    assert is_compiled == "True"
    assert list((installed / "rankscope" / "analysis" / "replay").glob("_loop.*.so"))
    assert file.startswith(str(installed))


def test_a_script_imports_its_own_module_named_tracer(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "tracer.py").write_text("OWNER = 'user'\n")
    (tmp_path / "train.py").write_text(
        "import tracer\nimport rankscope.tracer as ours\n"
        "print(tracer.OWNER, ours.current_tracer().enabled, ours.__file__)\n"
    )

    owner, enabled, file = run(
        *("env", f"RANKSCOPE_TRACE={tmp_path / 'spool'}", sys.executable, "-S"),
        *("-m", "rankscope.tracer", "train.py"),
        folder=tmp_path,
        path=installed,
    ).split()

    assert (owner, enabled) == ("user", "True")
    assert file.startswith(str(installed))


def test_a_folder_named_analysis_without_init_is_still_imported(
    installed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "analysis"
    folder.mkdir()
    (folder / "plots.py").write_text("OWNER = 'user'\n")

    code = "import analysis.plots, rankscope.analysis; print(analysis.plots.OWNER)"
    assert run(sys.executable, "-S", "-c", code, folder=tmp_path, path=installed) == "user\n"


def test_a_distribution_with_a_package_named_trainer_survives_install_and_uninstall(
    wheel: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    (other / "trainer").mkdir(parents=True)
    (other / "trainer" / "__init__.py").write_text("OWNER = 'other'\n")
    (other / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "other-trainer"\nversion = "1"\n'
        '[tool.setuptools]\npackages = ["trainer"]\n'
    )
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", str(environment), folder=tmp_path)
    python = environment / "bin" / "python"
    pip = (*PIP, "--python", str(python))
    offline = ("--no-deps", "--no-index", "--quiet")
    print_owner = (str(python), "-c", "import trainer; print(trainer.OWNER)")

    run(*PIP, "wheel", "--no-build-isolation", *offline, "-w", ".", "./other", folder=tmp_path)
    (other_wheel,) = tmp_path.glob("other_trainer-*.whl")
    run(*pip, "install", *offline, str(other_wheel), folder=tmp_path)
    run(*pip, "install", *offline, str(wheel), folder=tmp_path)
    assert run(*print_owner, folder=tmp_path) == "other\n"

    run(*pip, "uninstall", "--yes", "--quiet", "rankscope", folder=tmp_path)
    assert run(*print_owner, folder=tmp_path) == "other\n"

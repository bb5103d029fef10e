"""The start of the tracer by `rankscope run`: which processes of a command are traced."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from rankscope.tracer.autostart.sitecustomize import find_main
from tests.support.paths import PYTHON_PATH
from tests.tracer.programs import AUTOSTART, run_python

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("line", "main"),
    [
        ("python train.py --backend deepspeed", "train.py"),
        ("python -u -W error -X dev /opt/bin/torchrun train.py", "torchrun"),
        ("python -um torch.distributed.run train.py", "torch.distributed.run"),
        ("python -mtorch.distributed.run train.py", "torch.distributed.run"),
        ("python -W error::m.Warning -m accelerate.commands.launch", "accelerate.commands.launch"),
        ("python -Werror train.py", "train.py"),
        ("python -c pass", ""),
        ("python -", ""),
        ("python", ""),
    ],
)
def test_the_main_script_or_module_is_found_as_python_does(line: str, main: str) -> None:
    assert find_main(line.split()) == main


SAY = """
import os, sys
print("traced" if "rankscope.tracer" in sys.modules else "not traced")
"""


def start(folder: Path, script: str, *command: str, **environ: str) -> str:
    """Run a script beside a module named torch, and return what it prints.

    The tracer is turned off: it is the start of it that counts, and that module is empty.
    """
    (folder / "torch.py").write_text("")
    (folder / "script.py").write_text(script)
    own = {
        "PYTHONPATH": f"{AUTOSTART}{os.pathsep}{PYTHON_PATH}",
        "RANKSCOPE_TRACE": str(folder / "spool"),
        "RANKSCOPE_DISABLE": "1",
    }
    interpreter, *options = command or (sys.executable,)
    started = run_python(
        *options, folder / "script.py", interpreter=interpreter, **{**own, **environ}
    )
    assert started.stderr == ""
    return started.stdout


def test_a_script_that_imports_torch_is_traced(tmp_path: Path) -> None:
    assert start(tmp_path, f"import torch{SAY}") == "traced\n"


def test_a_script_without_torch_is_not(tmp_path: Path) -> None:
    assert start(tmp_path, SAY) == "not traced\n"


def test_a_launcher_is_not(tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text(f"import torch{SAY}")

    printed = start(tmp_path, "", sys.executable, str(tmp_path / "torchrun"))

    assert printed == "not traced\n"


PARENT = f"""
import subprocess
import torch{SAY}
if len(sys.argv) == 1:
    sys.stdout.flush()
    subprocess.run([sys.executable, __file__, "child"], check=True, env={{**os.environ, **PLACE}})
"""


@pytest.mark.parametrize(
    ("place", "child"),
    [("{}", "not traced"), ("{'LOCAL_RANK': '1'}", "traced"), ("{'RANK': '1'}", "traced")],
)
def test_a_helper_of_a_rank_is_not_and_another_rank_that_it_starts_is(
    tmp_path: Path, place: str, child: str
) -> None:
    printed = start(tmp_path, f"PLACE = {place}{PARENT}", RANK="0")

    assert printed == f"traced\n{child}\n"


def test_the_script_sees_the_path_and_arguments_that_it_would_without(tmp_path: Path) -> None:
    script = "import sys\nprint(sys.path, sys.argv, sys.flags, __name__, __spec__)"
    traced = start(tmp_path, script)
    plain = start(tmp_path, script, PYTHONPATH=PYTHON_PATH)

    assert traced == plain


def test_a_sitecustomize_of_the_environment_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.site_of_user = 7")
    path = os.pathsep.join([AUTOSTART, str(tmp_path), PYTHON_PATH])
    script = "import sitecustomize\nimport torch\nprint(site_of_user, sitecustomize.__file__)"

    printed = start(tmp_path, script + SAY, PYTHONPATH=path)

    assert printed == f"7 {tmp_path / 'sitecustomize.py'}\ntraced\n"


def test_an_environment_without_rankscope_uses_the_one_that_started_the_job(
    tmp_path: Path,
) -> None:
    bare = (sys._base_executable, "-s")  # type: ignore[attr-defined]
    without = "import importlib.util\nprint(importlib.util.find_spec('rankscope'))"
    assert start(tmp_path, without, *bare, PYTHONPATH="") == "None\n"

    assert start(tmp_path, f"import torch{SAY}", *bare, PYTHONPATH=AUTOSTART) == "traced\n"

"""``python -m rankscope.tracer SCRIPT ARGS``: run a training script traced, without an edit.

Under torchrun: ``torchrun ... -m rankscope.tracer train.py ARGS``.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import print_notice
from .install import install

if TYPE_CHECKING:
    from types import TracebackType

USAGE = """\
usage: python -m rankscope.tracer SCRIPT [ARGS...]        run a script, traced
       python -m rankscope.tracer -m MODULE [ARGS...]     run a module, traced
       python -m rankscope.tracer --running [SPOOL]       show what each rank is doing now
RANKSCOPE_TRACE names the folder for the records.
"""
BAD_USAGE = 2
OUR_FRAMES = frozenset({__file__, "<frozen runpy>"})


def main(arguments: list[str]) -> None:
    """Do what the command line asks; a script ends as it would without us.

    Raises:
        SystemExit: With 2 where the command line is no use.
    """
    match arguments:
        case ["--running", *spool]:
            from .job.running import print_running

            print_running(Path(spool[0]) if spool else default_spool())
        case ["-m", module, *rest]:
            _trace()
            sys.argv[:] = [module, *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *rest] if not script.startswith("-"):
            _run_script(script, rest)
        case _:
            sys.stderr.write(USAGE)
            sys.exit(BAD_USAGE)


def default_spool() -> Path:
    """Return where records go: ``RANKSCOPE_TRACE``, else a folder of the user's for local files."""
    named = os.environ.get("RANKSCOPE_TRACE")
    return Path(named) if named else Path(tempfile.gettempdir()) / f"rankscope-{os.getuid()}"


def _trace() -> None:
    spool = default_spool()
    if "RANKSCOPE_TRACE" not in os.environ and os.environ.get("LOCAL_RANK", "0") == "0":
        print_notice(f"recording into {spool} (set RANKSCOPE_TRACE to choose)")
    install(spool=spool, count_steps=True)
    _hide_our_frames()


def _run_script(script: str, arguments: list[str]) -> None:
    """Run a file in a fresh ``__main__``, as the interpreter itself would.

    Not by `runpy.run_path`: that takes the module away again at the end, when
    the job's threads and exit handlers may still need it.
    """
    try:
        source = Path(script).read_bytes()
    except OSError as problem:
        sys.stderr.write(f"rankscope: can't open {script!r}: {problem.strerror}\n")
        sys.exit(BAD_USAGE)
    _trace()
    sys.argv[:] = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))  # noqa: PTH120 - as Python does
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __builtins__=__builtins__,
        __file__=script,
        __loader__=SourceFileLoader("__main__", script),
        __package__=None,
        __cached__=None,
    )
    sys.modules["__main__"] = module
    exec(compile(source, script, "exec", dont_inherit=True), module.__dict__)  # noqa: S102


def _hide_our_frames() -> None:
    """Let a traceback begin with the script's own frame, as it would without us."""
    previous = sys.excepthook

    def hook(
        exc_type: type[BaseException], exc: BaseException, traceback: TracebackType | None
    ) -> None:
        while traceback is not None and traceback.tb_frame.f_code.co_filename in OUR_FRAMES:
            traceback = traceback.tb_next
        exc.__traceback__ = traceback
        previous(exc_type, exc, exc.__traceback__)

    sys.excepthook = hook


if __name__ == "__main__":
    main(sys.argv[1:])

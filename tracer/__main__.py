"""The launcher: ``python -m rankscope.tracer SCRIPT ARGS`` runs a training script traced."""

from __future__ import annotations

import contextlib
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

HELP = """\
usage: python -m rankscope.tracer SCRIPT [ARGS...]
       python -m rankscope.tracer -m MODULE [ARGS...]
       python -m rankscope.tracer --running [SPOOL]
       python -m rankscope.tracer --help

Run a training script and record what it does, without an edit. Under torchrun:
  torchrun --nproc-per-node 8 -m rankscope.tracer train.py ARGS

  SCRIPT [ARGS...]     run a file, as `python SCRIPT ARGS` does, and trace it
  -m MODULE [ARGS...]  run a module, as `python -m MODULE ARGS` does, and trace it
  --running [SPOOL]    run nothing; print which spans and communications are open in each
                       traced process, and for how long (default SPOOL: see RANKSCOPE_TRACE)
  -h, --help           print this help and exit

Environment variables:
  RANKSCOPE_TRACE      spool: the folder for the records, on a local disk or in /dev/shm
                       (default: rankscope-<user id> in the temporary folder)
  RANKSCOPE_RUN        name of the run (default: the job id given to torchrun or by Slurm,
                       else the script's name with the time)
  RANKSCOPE_PEAK_FLOPS, RANKSCOPE_FLOPS_PER_TOKEN
                       peak of one device in FLOP/s, and FLOPs of training on one token,
                       for an MFU where rankscope does not know them
  RANKSCOPE_COUNT_FLOPS
                       1: count the FLOPs of an unknown model in the first step, which is slow
  RANKSCOPE_DISABLE    1: run the script without tracing
"""
BAD_USAGE = 2
SEE_HELP = "see python -m rankscope.tracer --help"
OUR_FRAMES = frozenset({__file__, "<frozen runpy>"})


def main(arguments: list[str]) -> None:
    """Run what the command line names; a script ends as it would without the tracer.

    Raises:
        SystemExit: With 0 after the help, with 2 if the arguments cannot be used.
    """
    match arguments:
        case ["-h" | "--help"]:
            sys.stdout.write(HELP)
        case ["--running"] | ["--running", _]:
            from .job.running import format_running, read_running

            spool = Path(arguments[1]) if len(arguments) > 1 else default_spool()
            sys.stdout.writelines(f"{format_running(entry)}\n" for entry in read_running(spool))
        case ["-m", module, *rest]:
            sys.argv[:] = [module, *rest]
            _trace()
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *rest] if not script.startswith("-"):
            _run_script(script, rest)
        case _:
            sys.stderr.write(f"rankscope: {_describe_misuse(arguments)}; {SEE_HELP}\n")
            sys.exit(BAD_USAGE)


def default_spool() -> Path:
    """Return ``RANKSCOPE_TRACE``, or if it is unset a folder per user in the temporary folder."""
    named = os.environ.get("RANKSCOPE_TRACE")
    return Path(named) if named else Path(tempfile.gettempdir()) / f"rankscope-{os.getuid()}"


def _describe_misuse(arguments: list[str]) -> str:
    match arguments:
        case []:
            return "no script given"
        case ["-m"]:
            return "-m needs the name of a module"
        case ["--running", *_]:
            return "--running takes one folder at most"
        case _:
            return f"unknown option {arguments[0]!r}"


def _trace() -> None:
    spool = default_spool()
    if not os.environ.get("RANKSCOPE_TRACE"):
        problem = _make_private(spool)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print_notice(
                f"recording into {spool} (set RANKSCOPE_TRACE to choose another folder)"
                if problem is None
                else f"not tracing: {spool} {problem}; set RANKSCOPE_TRACE to choose another folder"
            )
        if problem is not None:
            return
    install(spool=spool, count_steps=True)
    _hide_our_frames()


def _make_private(folder: Path) -> str | None:
    """Make a folder that only this user can read; return why it can't be used, None if it can.

    In the temporary folder, another user may have created it first.
    """
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        return "is a link or a file"
    except OSError as problem:
        return f"can't be used ({problem.strerror})"
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return "belongs to another user"
        os.fchmod(descriptor, 0o700)
    except OSError as problem:
        return f"can't be used ({problem.strerror})"
    finally:
        os.close(descriptor)
    return None


def _run_script(script: str, arguments: list[str]) -> None:
    """Run a file in a fresh ``__main__``, as the interpreter does.

    `runpy.run_path` would remove the module at the end, when threads and exit handlers of the
    job may still need it.
    """
    try:
        source = Path(script).read_bytes()
    except OSError as problem:
        sys.stderr.write(f"rankscope: can't open {script!r}: {problem.strerror}\n")
        sys.exit(BAD_USAGE)
    sys.argv[:] = [script, *arguments]
    _trace()
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
    """Make tracebacks begin at the script's first frame, as they do without the tracer."""
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

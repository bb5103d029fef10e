"""Start of the tracer in the processes of `rankscope run`.

Python imports a module of this name as it starts. `rankscope run` puts its folder on PYTHONPATH, so
the job's command stays as it is: interpreter options, shell scripts and launchers work, and
tracebacks, `sys.argv` and `sys.path` are those of a job that is not traced.

A process is traced from its import of torch on, unless it is a launcher or a helper of a traced one
(a worker of a loader, a compiler). A process that no launcher has numbered, though it belongs to
others, is traced once it initialises `torch.distributed`: a worker of Ray, a rank that Lightning
starts. Nothing here raises into the job or prints.
"""

from __future__ import annotations

import os
import sys

LAUNCHERS = frozenset(
    {
        "accelerate", "accelerate-launch", "deepspeed", "fabric", "lightning", "torchrun",
        "accelerate.commands.accelerate_cli", "accelerate.commands.launch",
        "deepspeed.launcher.launch", "deepspeed.launcher.runner",
        "torch.distributed.launch", "torch.distributed.run",
    }
)  # fmt: skip
"""Scripts and modules that import torch only to start the ranks."""

TRACED_VARIABLE = "RANKSCOPE_TRACED"
"""Rank variables of the traced process above; a child with the same ones is its helper."""

RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
PLACE_VARIABLES = (*RANKS, "LOCAL_RANK")
OPTIONS_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib takes 5 ms
PACKAGE = os.path.dirname(os.path.dirname(FOLDER))  # noqa: PTH120


def find_main(orig_argv: list[str]) -> str:
    """Return the script or module that an interpreter runs; "" if it reads its program.

    Args:
        orig_argv: The command line, the interpreter first.
    """
    words = iter(orig_argv[1:])
    for word in words:
        if not word.startswith("-"):
            return os.path.basename(word)  # noqa: PTH119
        if word in OPTIONS_WITH_VALUE:
            next(words, "")
        elif not word.startswith(("--", "-W", "-X")):
            options, has_module, module = word.partition("m")
            if "c" in options or word == "-":
                return ""
            if has_module:
                return module or next(words, "")
    return ""


def _start() -> None:
    """Watch for the import of torch if this process may be a rank."""
    if (
        sys.version_info < (3, 11)  # the interpreter is the job's
        or not os.environ.get("RANKSCOPE_TRACE")
        or find_main(sys.orig_argv) in LAUNCHERS
    ):
        return
    is_numbered = any(name in os.environ for name in RANKS)
    is_helper = os.environ.get(TRACED_VARIABLE) == _place()
    if is_helper and is_numbered:
        return
    is_one_of_several = os.environ.get("WORLD_SIZE", "1") != "1" and not is_numbered
    from importlib.util import module_from_spec, spec_from_file_location

    # By its path: importing the tracer itself takes 0.1 s, in each process that needs no torch.
    path = f"{PACKAGE}/tracer/capture/after_import.py"
    spec = spec_from_file_location("_rankscope_after_import", path)
    if spec is not None and spec.loader is not None:
        watch = module_from_spec(spec)
        spec.loader.exec_module(watch)
        sys.meta_path.append(_Package())  # type: ignore[arg-type]
        waits = is_helper or is_one_of_several
        watch.after_import("torch", _trace_once_it_is_a_rank if waits else _trace)


def _place() -> str:
    return "/".join(os.environ.get(name, "") for name in PLACE_VARIABLES)


def _trace() -> None:
    os.environ[TRACED_VARIABLE] = _place()
    from rankscope.tracer import install

    install(count_steps=True)


def _trace_once_it_is_a_rank() -> None:
    from rankscope.tracer import install
    from rankscope.tracer.capture.spawned import arm_unnumbered

    epoch = 1 + int(os.environ.get("RANKSCOPE_EPOCH") or 0)
    arm_unnumbered(os.environ["RANKSCOPE_TRACE"], epoch, install)


class _Package:
    """The finder, asked last, of this package in an environment that does not have it."""

    def find_spec(self, name: str, _path: object, _target: object = None) -> object:
        if name != "rankscope":
            return None
        from importlib.util import spec_from_file_location

        return spec_from_file_location(
            name, f"{PACKAGE}/__init__.py", submodule_search_locations=[PACKAGE]
        )


def _run_next() -> None:
    """Import the `sitecustomize` that this one hides, as Python would have done."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != FOLDER]  # noqa: PTH100
    ours = sys.modules.pop(__name__)
    try:
        import sitecustomize  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault(__name__, ours)


if __name__ == "sitecustomize":
    try:  # noqa: SIM105 - contextlib takes 3 ms
        _start()
    except Exception:  # noqa: BLE001, S110 - promise 1: harmless
        pass
    _run_next()

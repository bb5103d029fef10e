"""Ranks that no launcher has numbered when they start.

A script starts them itself with `multiprocessing` (by spawn, forkserver or fork), or another
program does and numbers them later: Lightning, Ray. A process is a rank if it initialises
`torch.distributed`; workers of a loader never do. It is traced from then on. A process that was
traced before, as the only rank, stays in the run's epoch before that of the ranks.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import multiprocessing.spawn
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from ..errors import print_notice
from ..job.identity import distributed
from ..patches import Patches
from ..record.current import current_tracer, shutdown
from ..record.recorder import Recorder
from .after_import import after_import

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..record.interface import Tracer

C10D = "torch.distributed.distributed_c10d"
EPOCH_VARIABLE = "RANKSCOPE_EPOCH"
LAUNCHER_VARIABLES = ("RANK", "TORCHELASTIC_RUN_ID", "SLURM_PROCID")
"""A process that has one of them is itself a rank, and its children are none."""

ARM = """
try:
    from {module} import arm
    from {install.__module__} import install
    arm(*{settings!r}, install)
except Exception:
    pass
"""
"""What a spawned child executes as it reads how to prepare itself, before it imports the script.
As text, because a child that can't import this package must start as it would without it."""

_of_forks: tuple[str, str, int, Callable[..., Tracer]] | None = None
"""Spool, run and epoch of the ranks that this process may fork, and the function that installs."""

_own: tuple[str, str | None, int, Callable[..., Tracer]] | None = None
"""Those of this process, if it is a child that may become a rank."""

_alone: tuple[Recorder, Callable[[], Tracer]] | None = None
"""The recorder of this process if it may be one rank of several, and what installs another."""


class _Arming:
    """Executes `ARM` where it is unpickled."""

    def __init__(self, code: str) -> None:
        self._code = code

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str, dict[str, object]]]:
        return exec, (self._code, {})


def trace_children(
    recorder: Recorder, install: Callable[..., Tracer], again: Callable[[], Tracer] | None
) -> None:
    """Trace the ranks that this process starts before its own first step, or that it becomes.

    Args:
        again: Installs as before; None if this process stays what it is.
    """
    global _of_forks, _alone  # noqa: PLW0603 - read in a forked child
    identity = recorder.identity
    if identity.world_size > 1 or any(name in os.environ for name in LAUNCHER_VARIABLES):
        return
    _alone = None if again is None else (recorder, again)
    spool = os.path.abspath(recorder.folder.parent.parent)  # noqa: PTH100 - its links stay
    settings = spool, identity.run_id, identity.epoch + 1
    code = ARM.format(module=__name__, install=install, settings=settings)
    _of_forks = (*settings, install)
    patches = Patches()

    def wrap(original: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
        @functools.wraps(original)
        def get_preparation_data(name: str) -> dict[str, Any]:
            data = original(name)
            return {**data, "rankscope": _Arming(code)} if _starts_ranks() else data

        return get_preparation_data

    patches.wrap(multiprocessing.spawn, "get_preparation_data", wrap)
    recorder.on_shutdown(patches.undo)
    recorder.on_shutdown(_start_no_ranks)
    recorder.on_step_begin(_first_step_begins)


def _first_step_begins() -> bool:
    _start_no_ranks()
    return True


def _starts_ranks() -> bool:
    return _of_forks is not None


def _start_no_ranks() -> None:
    global _of_forks, _alone  # noqa: PLW0603
    _of_forks = _alone = None


def arm(spool: str, run: str | None, epoch: int, install: Callable[..., Tracer]) -> None:
    """Install a tracer in this child once it has initialised `torch.distributed`."""
    global _own  # noqa: PLW0603
    _own = spool, run, epoch, install
    patches = Patches()
    after_import(C10D, lambda: watch_group(patches))
    _watch_end()


def arm_unnumbered(spool: str, epoch: int, install: Callable[..., Tracer]) -> None:
    """Do the same in a process of another program, which may kill it when its training is done.

    Ray does so. What is recorded ends with the process group, and a later group is another epoch.
    """
    if _own is not None:  # a child of `multiprocessing`
        return
    arm(spool, None, epoch, install)

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def destroy_process_group(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            global _own  # noqa: PLW0603
            result = original(*args, **kwargs)
            # In a `finally` the exception that ends the process is still to come.
            if distributed() is None and sys.exc_info()[0] is None:
                shutdown()
                _own = spool, None, epoch + 1, install
            return result

        return destroy_process_group

    patches = Patches()
    after_import(C10D, lambda: _wrap_in_torch(patches, "destroy_process_group", wrap))


def watch_group(patches: Patches) -> None:
    """Call `_install_once` or `_install_again` after `init_process_group`.

    In the parent too: a script may import the function by its name, before it forks.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            result = original(*args, **kwargs)
            _install_once()
            _install_again()
            return result

        return init_process_group

    _wrap_in_torch(patches, "init_process_group", wrap)


def _wrap_in_torch(
    patches: Patches, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    c10d, dist = sys.modules[C10D], sys.modules["torch.distributed"]
    patches.wrap(c10d, name, wrap)
    if hasattr(dist, name):  # else it copies the name in a moment
        patches.wrap(dist, name, lambda _: getattr(c10d, name))


def _install_once() -> None:
    """Install the tracer of a child that has become a rank."""
    global _own
    settings, _own = _own, None
    if settings is None or current_tracer().enabled:
        return
    from multiprocessing.util import Finalize

    spool, run, epoch, install = settings
    os.environ.setdefault(EPOCH_VARIABLE, str(epoch))
    if install(spool=spool, run=run, count_steps=True).enabled:
        Finalize(None, shutdown, exitpriority=0)  # a child runs no exit handlers


def _install_again() -> None:
    """Replace the tracer of a process that took itself for the only rank, and is one of several."""
    global _alone
    settings, _alone = _alone, None
    dist = distributed()
    if settings is None or dist is None or dist.get_world_size() == 1:
        return
    recorder, install = settings
    if current_tracer() is recorder:
        shutdown()
        if dist.get_rank() > 0:  # the run's epoch before that of the ranks has one process
            shutil.rmtree(recorder.folder, ignore_errors=True)
        os.environ[EPOCH_VARIABLE] = str(recorder.identity.epoch + 1)
        install()


def _watch_end() -> None:
    """Record the exception that ends this child, whose interpreter calls no `sys.excepthook`."""
    process = multiprocessing.process.BaseProcess
    original = process.run

    @functools.wraps(original)
    def run(self: multiprocessing.process.BaseProcess) -> None:
        try:
            original(self)
        except BaseException as problem:
            tracer = current_tracer()
            # torch's own processes write the exception to a file, then exit with 1.
            cause = problem.__context__ if isinstance(problem, SystemExit) else problem
            if isinstance(tracer, Recorder) and cause is not None:
                try:
                    tracer.record_exception(cause)
                except Exception:  # noqa: BLE001 - promise 1: harmless
                    print_notice("the end of this process could not be recorded")
            raise

    process.run = run  # type: ignore[method-assign]


def _arm_forked() -> None:
    settings = _of_forks
    if settings is not None:
        try:
            arm(*settings)
        except Exception:  # noqa: BLE001 - promise 1: harmless
            print_notice("ranks that this process forks are not traced")


os.register_at_fork(after_in_child=_arm_forked)

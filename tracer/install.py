"""Installation of the tracer in a process.

Modules that only a traced process needs are imported when a tracer is installed: a job that merely
imports the package pays for little more than its spans.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import shutil
import stat
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from .errors import print_notice
from .record.current import current_tracer, set_current, shutdown
from .record.exit_record import write_json
from .record.interface import NOOP_TRACER
from .record.plain_values import type_name
from .record.recorder import Recorder
from .record.sampling import Settings
from .record.segment_pool import DEFAULT_SEGMENT_BYTES, DEFAULT_SPOOL_BYTES, SpoolLimits
from .span import UnixNs
from .spool import (
    HEADER_BYTES,
    MANIFEST_FILE,
    RECORD_BYTES,
    SPOOL_VERSION,
    DropReason,
    SpoolIdentity,
    read_anchor,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from .job.identity import Identity
    from .job.manifest import JobDescription
    from .record.interface import Tracer
    from .spool import Anchor
    from .topology import Coords, Layout


_install_lock = threading.Lock()
"""Held by the thread that installs; no thread ever waits for it."""


class Options(TypedDict, total=False):
    """Declarations of a job; see `install`."""

    layout: Layout | None
    coords: Coords | None
    model_name: str
    flops_per_token: float | None
    flops_convention: str
    recomputed_flops_per_token: float | None
    shape: Mapping[str, object] | None
    device_name: str
    dtype: str
    peak_flops_per_s: float | None
    paced: Mapping[str, object] | None
    config: Mapping[str, object] | None
    seeds: Mapping[str, object] | None


def install(
    *,
    spool: str | os.PathLike[str] | None = None,
    run: str | None = None,
    model: Any = None,  # noqa: ANN401 - a torch.nn.Module; torch may be absent
    count_steps: bool | None = None,
    **job: Unpack[Options],
) -> Tracer:
    """Record spans of this process from now on, and capture what torch does.

    Call it once, after `torch.distributed.init_process_group` if the job uses that, and before the
    model runs. A second call returns the same tracer. It never raises: if the tracer cannot work,
    one line on stderr says why and the job runs untraced.

    Args:
        spool: Folder for the records, on a local disk or ``/dev/shm``. If None,
            ``RANKSCOPE_TRACE``; without that nothing is recorded.
        run: Name of the run. If None, ``RANKSCOPE_RUN``, the launcher's job id, or a generated
            name, equal on all ranks and printed by rank 0.
        model: The root module, whose forward is captured if there is no pipeline. If None, the
            outermost module that an optimizer trains, found at the first batch.
        count_steps: Whether to count optimizer steps if the job does not report steps
            (`begin_steps`, `step`). None: after the first optimizer step, which counts as start-up;
            True: from the first batch on; False: never.
        job: What the job declares for the manifest: ``layout``, ``coords`` (`tracer.topology`),
            ``model_name``, ``flops_per_token`` with its ``flops_convention``,
            ``recomputed_flops_per_token`` (those that activation recomputation repeats), ``shape``
            (sizes of the layers, `tracer.job.model_memory.layer_shape`), ``device_name``,
            ``dtype``, ``peak_flops_per_s`` of that device at that dtype, ``paced`` (how the trainer
            pads its compute), ``config``, ``seeds``. FLOPs, device and dtype that are not declared
            are derived from the model if its architecture is known (`tracer.job.flops`).

    Returns:
        The tracer; `NOOP_TRACER` if nothing is recorded.
    """
    current = current_tracer()
    if current.enabled:
        return current
    # A second caller, in another thread or a signal handler, must not install another tracer.
    install_lock = _install_lock  # a signal handler may fork this thread; the child has a new lock
    if not install_lock.acquire(blocking=False):
        return NOOP_TRACER
    try:
        if current_tracer().enabled:
            return current_tracer()
        folder = spool or os.environ.get("RANKSCOPE_TRACE")
        if not folder or os.environ.get("RANKSCOPE_DISABLE") == "1":
            return NOOP_TRACER
        from .job.manifest import JobDescription, count_parameters

        description = JobDescription(num_parameters=count_parameters(model), **job)
        return _install(Path(folder), run, model, description, count_steps)
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        print_notice(f"not tracing this process: {_describe_error(problem)}")
        return NOOP_TRACER
    finally:
        install_lock.release()


def _install(
    spool: Path,
    run: str | None,
    model: Any,  # noqa: ANN401
    job: JobDescription,
    count_steps: bool | None,  # noqa: FBT001
) -> Tracer:
    from .job.identity import read_identity

    identity = read_identity(run, os.environ)
    if identity.is_generated and identity.rank == 0:
        print_notice(f"recording run {identity.run_id}")
    folder = create_process_folder(spool, identity.run_id, format_folder_name(identity))
    try:
        recorder = _start_recorder(folder, identity, job)
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)  # else it would describe a process that was lost
        raise
    set_current(recorder)  # before the captures: a child forked meanwhile drops it
    try:
        again = functools.partial(_install_again, spool, run, job) if count_steps else None
        _start_captures(recorder, model, job, count_steps, again)
        _record_end(recorder)
    except Exception:
        shutdown()
        raise
    return recorder


def _install_again(spool: Path, run: str | None, job: JobDescription) -> Tracer:
    """Install in a process whose rank has become known."""
    try:
        return _install(spool, run, None, job, count_steps=True)
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        print_notice(f"not tracing this process: {_describe_error(problem)}")
        return NOOP_TRACER


def create_process_folder(spool: Path, run_id: str, name: str) -> Path:
    """Create the folder of a process, which only its user can read and write.

    If the spool has the set-group-ID bit, its group can too: an agent of another user reads the
    files and deletes segments.

    Raises:
        OSError: It can't be created, or the run's folder is a link or belongs to another user, who
            could replace files while they are written.
    """
    spool.mkdir(mode=0o700, parents=True, exist_ok=True)
    is_shared = spool.stat().st_mode & stat.S_ISGID
    run = spool / run_id
    with contextlib.suppress(FileExistsError):
        _make_folder(run, is_shared=bool(is_shared))
    status = run.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in {0, os.geteuid()}:
        raise OSError(
            errno.EPERM,
            f"{run} is a link or belongs to another user: choose another folder or run name",
        )
    _make_folder(run / name, is_shared=bool(is_shared))
    return run / name


def _make_folder(folder: Path, *, is_shared: bool) -> None:
    folder.mkdir(mode=0o700)
    if is_shared:
        folder.chmod(0o2770)  # whatever the umask of the job


def _start_recorder(folder: Path, identity: Identity, job: JobDescription) -> Recorder:
    from .job.manifest import build_manifest

    manifest = build_manifest(identity, job, started_ns=UnixNs(time.time_ns()), environ=os.environ)
    write_json(folder / MANIFEST_FILE, manifest)
    recorder = Recorder(
        folder,
        make_spool_identity(identity, read_anchor()),
        limits=read_limits(os.environ),
        settings=read_settings(os.environ),
    )
    recorder.start()
    return recorder


def _start_captures(
    recorder: Recorder,
    model: Any,  # noqa: ANN401
    job: JobDescription,
    count_steps: bool | None,  # noqa: FBT001
    again: Callable[[], Tracer] | None,
) -> None:
    from .capture.spawned import trace_children
    from .capture.start import start_captures
    from .job.profile import offer_profiles
    from .job.slow_step_stacks import watch_slow_steps

    start_captures(
        recorder,
        model=model,
        layout=job.layout,
        derive_layout=job.layout is None and job.coords is None,
        count_steps=count_steps,
    )
    watch_slow_steps(recorder)
    trace_children(recorder, install, again)
    offer_profiles(recorder)


def format_folder_name(identity: Identity) -> str:
    """Return the name of this process's folder inside the folder of its run."""
    return f"e{identity.epoch}-r{identity.rank:05d}-{identity.process_uuid.hex()[:12]}"


def make_spool_identity(identity: Identity, anchor: Anchor) -> SpoolIdentity:
    """Return the identity for all headers of the process; each file sets its capacity and lane."""
    return SpoolIdentity(
        version=SPOOL_VERSION,
        header_bytes=HEADER_BYTES,
        record_bytes=RECORD_BYTES,
        capacity=0,
        segment=0,
        lane=0,
        rank=identity.rank,
        world_size=identity.world_size,
        epoch=identity.epoch,
        pid=identity.pid,
        process_uuid=identity.process_uuid,
        boot_id=identity.boot_id,
        host=identity.host,
        run_id=identity.run_id,
        anchor_monotonic_ns=anchor.monotonic_ns,
        anchor_unix_ns=anchor.unix_ns,
        anchor_error_ns=anchor.error_ns,
    )


def read_limits(environ: Mapping[str, str]) -> SpoolLimits:
    """Return the disk limits of the process from the environment."""
    return SpoolLimits(
        segment_bytes=int(environ.get("RANKSCOPE_SEGMENT_BYTES") or DEFAULT_SEGMENT_BYTES),
        spool_bytes=int(environ.get("RANKSCOPE_SPOOL_BYTES") or DEFAULT_SPOOL_BYTES),
    )


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Return what to record until a control file changes it, from the environment.

    Raises:
        ValueError: A variable is not valid.
    """
    return Settings(
        recording=environ.get("RANKSCOPE_RECORDING", "1") != "0",
        level=environ.get("RANKSCOPE_LEVEL") or "all",
        sample_every=int(environ.get("RANKSCOPE_SAMPLE_EVERY") or 1),
    )


def _record_end(recorder: Recorder) -> None:
    """Write an exit record however Python ends. Signal handlers are not touched."""
    previous = sys.excepthook

    def note(
        exc_type: type[BaseException], exc: BaseException, traceback: TracebackType | None
    ) -> None:
        try:
            if not recorder.closed:
                recorder.record_exception(exc)
        except Exception:  # noqa: BLE001 - else it would be printed instead of the job's own
            recorder.drop(DropReason.INTERNAL_ERROR)
        finally:
            previous(exc_type, exc, traceback)

    sys.excepthook = note
    atexit.register(shutdown)


def _describe_error(problem: Exception) -> str:
    """Return the ``repr`` of an error. One that belongs to the job may not even have that."""
    try:
        return repr(problem)
    except Exception:  # noqa: BLE001 - promise 1: harmless
        return type_name(problem)


def _renew_lock_in_child() -> None:
    global _install_lock  # noqa: PLW0603 - its holder is not in the child
    _install_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock_in_child)

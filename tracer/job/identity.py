"""Identity of this process: run, epoch, rank and host, from the job and the environment."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import sys
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import print_notice

if TYPE_CHECKING:
    from collections.abc import Mapping

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Valid run ids. A run id names a folder, so nothing else is allowed."""

MAX_SCRIPT = 40
"""Characters of the script in a run id: the time needs 14."""

ELASTIC_VARIABLE = "TORCHELASTIC_RUN_ID"
RANDOM_UUID = 4
UUID_LENGTH = 36

RUN_KEY = "rankscope/run_id"
JOB_KEY = "rankscope/job"
STORE_TIMEOUT = timedelta(seconds=30)
JOB_TIMEOUT = timedelta(seconds=5)
"""A launch without a key is still recorded, so its ranks do not wait for a slow store."""

MAX_RANK = 2**32 - 1

RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)
"""Rank, size of the world and rank on the host, by launcher: torchrun and its like, srun, mpirun.
The batch script of Slurm has the first and the last of its own, too, and no number of tasks.
Source: the pages of srun (output environment variables) and Open MPI's mpirun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One process of one run."""

    run_id: str
    epoch: int
    rank: int
    world_size: int
    local_rank: int
    host: str
    pod: str | None
    pid: int
    process_uuid: bytes
    boot_id: bytes
    is_generated: bool
    """Whether the run's name was generated, so that rank 0 should print it."""

    job: str
    """Key of the launch, equal on all of its ranks and different for every other launch, so that
    two jobs with one run name are distinguished; "" if the ranks cannot agree on one."""


def read_identity(run: str | None, environ: Mapping[str, str]) -> Identity:
    """Return the identity of this process.

    Args:
        run: The run's name from the job; if None, the environment's, the launcher's, or a generated
            name that the ranks agree on.
    """
    rank, world_size = _read_rank(environ)
    given = run or environ.get("RANKSCOPE_RUN") or _launcher_run(environ)
    run_id = clean_run_id(given) if given else _generate_run_id(rank, world_size, environ)
    return Identity(
        run_id=run_id,
        epoch=_number(environ.get("RANKSCOPE_EPOCH") or environ.get("TORCHELASTIC_RESTART_COUNT")),
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ.get(_rank_variables(environ)[2])),
        host=environ.get("RANKSCOPE_HOST") or socket.gethostname(),
        pod=environ.get("HOSTNAME") if "KUBERNETES_SERVICE_HOST" in environ else None,
        pid=os.getpid(),
        process_uuid=uuid.uuid4().bytes,
        boot_id=read_boot_id(),
        is_generated=not given,
        job=_job_key(rank, world_size, environ) or ("" if given else _process_key(os.getppid())),
    )


def clean_run_id(text: object) -> str:
    """Return ``text`` if it is a valid run id; else a valid one made from it, with a notice."""
    raw = str(text)  # not only strings: numbers and UUIDs name runs too
    if RUN_ID.fullmatch(raw):
        return raw
    digest = hashlib.blake2b(raw.encode("utf-8", "replace"), digest_size=4).hexdigest()
    kept = re.sub(r"[^A-Za-z0-9._-]+", "-", raw[:200]).strip("-._")[:54] or "run"
    cleaned = f"{kept}-{digest}"
    print_notice(
        f"the run id {raw[:80]!r} is not valid"
        f" (letters, digits, '.', '_', '-', at most 63): using {cleaned!r}"
    )
    return cleaned


def read_boot_id() -> bytes:
    """Return the id of this boot, 16 bytes; zeros if the kernel does not provide it."""
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return bytes(16)


def distributed() -> Any | None:  # noqa: ANN401 - torch may be absent, and its type too
    """Return ``torch.distributed`` if the job has initialised it; never import it."""
    torch = sys.modules.get("torch")
    dist = getattr(torch, "distributed", None)
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist


def _read_rank(environ: Mapping[str, str]) -> tuple[int, int]:
    dist = distributed()
    if dist is not None:
        return dist.get_rank(), dist.get_world_size()
    rank_name, size_name, _ = _rank_variables(environ)
    rank = _number(environ.get(rank_name))
    return rank, max(_number(environ.get(size_name), missing=1), rank + 1)


def _rank_variables(environ: Mapping[str, str]) -> tuple[str, str, str]:
    """Return the variables of the launcher of this process; torchrun's if there is none."""
    if "RANK" in environ:
        return RANK_VARIABLES[0]
    given = (names for names in RANK_VARIABLES if names[0] in environ and names[1] in environ)
    return next(given, RANK_VARIABLES[0])


def _number(text: str | None, *, missing: int = 0) -> int:
    try:
        return min(max(int(text or missing), 0), MAX_RANK)
    except ValueError:
        return missing


def _launcher_run(environ: Mapping[str, str]) -> str | None:
    elastic = environ.get(ELASTIC_VARIABLE)
    if elastic and elastic != "none" and not _is_generated(elastic, environ):
        return elastic
    return environ.get("SLURM_JOB_ID")


def _is_generated(run_id: str, environ: Mapping[str, str]) -> bool:
    """Return whether torchrun generated the id, as on a single host without ``--rdzv-id``."""
    with contextlib.suppress(ValueError):
        is_random = uuid.UUID(run_id).version == RANDOM_UUID and len(run_id) == UUID_LENGTH
        return is_random and environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
    return False


def _generate_run_id(rank: int, world_size: int, environ: Mapping[str, str]) -> str:
    """Generate a name that all ranks share, through a store of the job or their parent process."""
    dist = distributed()
    if dist is not None and world_size > 1:
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            store.set(RUN_KEY, _name_run(os.getpid()))
        store.wait([RUN_KEY], STORE_TIMEOUT)
        return str(store.get(RUN_KEY).decode())
    if _has_other_hosts(world_size, environ):
        return _agree_through_agent(world_size, environ)
    return _name_run(_launcher_pid(world_size, environ))


def _job_key(rank: int, world_size: int, environ: Mapping[str, str]) -> str:
    """Return a key that the ranks of this launch share, and no other launch has; "" if unknown.

    A name that the user gave may name several launches, and the launcher's does too
    (``--rdzv_id 101``).
    """
    launcher = _launcher_pid(world_size, environ)
    if world_size == 1:
        return _process_key(launcher)
    try:
        if ELASTIC_VARIABLE in environ:
            if not _has_other_hosts(world_size, environ):
                # A rank of another host's torchrun, without its store, has another parent.
                is_alone = _number(environ.get("LOCAL_WORLD_SIZE"), missing=0) == world_size
                return _process_key(launcher) if is_alone else ""
            store = _open_agent_store(environ, JOB_TIMEOUT)
            return _agree_on_first(store, JOB_KEY, _process_key(launcher))
        if slurm := environ.get("SLURM_JOB_ID"):
            step, restarts = environ.get("SLURM_STEP_ID"), environ.get("SLURM_RESTART_COUNT")
            return f"slurm-{slurm}.{step or 0}.{restarts or 0}"
        dist = distributed()
        if dist is not None:
            store = dist.distributed_c10d._get_default_store()
            return _agree_on_first(store, JOB_KEY, _process_key(launcher))
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        if rank == 0:
            print_notice(
                "the ranks could not agree on a key of this launch: another job with this run's"
                f" name may be taken for its restart ({type(problem).__name__})"
            )
    return ""


def _agree_on_first(store: Any, key: str, proposal: str) -> str:  # noqa: ANN401
    return str(store.compare_set(key, "", proposal).decode())


def _open_agent_store(environ: Mapping[str, str], timeout: timedelta) -> Any:  # noqa: ANN401
    from torch._C._distributed_c10d import TCPStore

    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, timeout=timeout)


def _has_other_hosts(world_size: int, environ: Mapping[str, str]) -> bool:
    local_size = _number(environ.get("LOCAL_WORLD_SIZE"), missing=world_size)
    return local_size < world_size and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _agree_through_agent(world_size: int, environ: Mapping[str, str]) -> str:
    """Agree through the store of torchrun's agents, before the job joins it.

    The first rank names the run. A restarted job finds the name again.
    """
    name = _name_run(_launcher_pid(world_size, environ))
    try:
        return _agree_on_first(_open_agent_store(environ, STORE_TIMEOUT), RUN_KEY, name)
    except Exception as problem:  # noqa: BLE001 - promise 1: harmless
        print_notice(
            "the hosts of this run could not agree on a name, so each uses its own:"
            f" set RANKSCOPE_RUN ({type(problem).__name__})"
        )
        return name


def _launcher_pid(world_size: int, environ: Mapping[str, str]) -> int:
    """Return the process that started the ranks of this host: torchrun, else the parent; of a rank
    without a launcher itself.

    A program between torchrun and the rank (``numactl``, a shell) has torchrun's variable too.
    """
    if ELASTIC_VARIABLE not in environ:
        return os.getppid() if world_size > 1 else os.getpid()
    setting = f"{ELASTIC_VARIABLE}={environ[ELASTIC_VARIABLE]}".encode()
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while setting in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            pid = int(_process_stat(pid)[1])
    return pid


def _name_run(pid: int) -> str:
    """Return a name made of the script's and the start time of process ``pid``, in UTC."""
    script = Path(sys.argv[0] if sys.argv and sys.argv[0] != "-c" else "")
    name = script.parent.name if script.stem == "__main__" else script.name.removesuffix(".py")
    name = "notebook" if name.endswith("kernel_launcher") else name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:MAX_SCRIPT] or "run"
    when = time.strftime("%Y%m%d-%H%M", time.gmtime(process_started_ns(pid) // 10**9))
    return f"{name}-{when}"


def _process_key(pid: int) -> str:
    """Return a text that no other process has, made of a process's start time and a hash."""
    started_ns = process_started_ns(pid)
    seed = f"{read_boot_id().hex()}:{pid}:{started_ns}"
    digest = hashlib.blake2b(seed.encode(), digest_size=3).hexdigest()
    when = time.strftime("%Y%m%d-%H%M%S", time.gmtime(started_ns // 10**9))
    return f"run-{when}-{digest}"


def process_started_ns(pid: int) -> int:
    """Return when process ``pid`` started, Unix time in ns; the same in every process."""
    try:
        ticks = int(_process_stat(pid)[19])
        booted = re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return (int(booted[1]) if booted else 0) * 10**9 + ticks * 10**9 // os.sysconf("SC_CLK_TCK")


def _process_stat(pid: int) -> list[str]:
    """Return the fields of a process after its name: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()

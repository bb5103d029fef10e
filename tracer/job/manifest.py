"""The run manifest: what a rank reports of itself before its first span."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import print_notice
from ..record.exit_record import write_json
from ..record.plain_values import plain_copy
from ..spool import MANIFEST_FILE, read_regular_file
from .identity import process_started_ns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..span import UnixNs
    from ..topology import Coords, Layout
    from .identity import Identity

MANIFEST_VERSION = 1
ENVIRONMENT_PREFIXES = ("NCCL_", "CUDA_", "TORCH_", "GLOO_")
ENVIRONMENT_NAMES = ("OMP_NUM_THREADS",)
HIDDEN = "hidden"
SECRET_NAME = re.compile(r"(?i:token|key|secret|password|passwd|credential)s?(?![a-z])")
"""Name of a secret: ``hub_token``, ``apiKey`` or ``NCCL_IB_PKEY``, but not ``tokenizer``."""

PEAK_VARIABLE = "RANKSCOPE_PEAK_FLOPS"
FLOPS_VARIABLE = "RANKSCOPE_FLOPS_PER_TOKEN"
VARIABLES = {
    PEAK_VARIABLE: "FLOP/s of one device, such as 989e12",
    FLOPS_VARIABLE: "FLOPs of training on one token, such as 48e9",
}
"""Variables by which a job without an edit declares what MFU needs, and what they contain."""

PACKAGES = ("numpy", "triton", "transformers", "flash-attn", "transformer-engine", "deepspeed")

MAX_GIT_BYTES = 16 << 20
"""Of ``packed-refs``, which has a line of some 100 bytes for each branch and tag."""

MAX_LINKS = 5
"""Names that may lead to each other, as ``HEAD`` to a branch."""

COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
REF = re.compile(r"refs(?:/(?!\.)[^/\0]+)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDescription:
    """Declarations of the job in `tracer.install`; all may be unknown."""

    layout: Layout | None = None
    coords: Coords | None = None
    model_name: str = ""
    num_parameters: int | None = None
    flops_per_token: float | None = None
    flops_convention: str = ""
    recomputed_flops_per_token: float | None = None
    shape: Mapping[str, object] | None = None
    device_name: str = ""
    dtype: str = ""
    peak_flops_per_s: float | None = None
    paced: Mapping[str, object] | None = None
    config: Mapping[str, object] | None = None
    seeds: Mapping[str, object] | None = None


def build_manifest(
    identity: Identity, job: JobDescription, *, started_ns: UnixNs, environ: Mapping[str, str]
) -> dict[str, object]:
    """Return the manifest that `docs/spool-format.md` describes.

    Args:
        started_ns: When the tracer was installed, Unix time.
        environ: Environment of the process; only allowed names are kept.
    """
    commit = read_commit()
    known = asdict(identity)
    del known["is_generated"]
    manifest = {
        "version": MANIFEST_VERSION,
        **known,
        "process_uuid": identity.process_uuid.hex(),
        "boot_id": identity.boot_id.hex(),
        "process_started_ns": process_started_ns(identity.pid),
        "started_ns": started_ns,
        "layout": job.layout.to_dict() if job.layout else None,
        "coords": job.coords.to_dict() if job.coords else None,
        "device": {
            "name": job.device_name,
            "uuid": None,
            "dtype": job.dtype,
            "peak_flops_per_s": read_flops(environ, PEAK_VARIABLE)
            if job.peak_flops_per_s is None
            else job.peak_flops_per_s,
        },
        "model": {
            "name": job.model_name,
            "num_parameters": job.num_parameters,
            "flops_per_token": read_flops(environ, FLOPS_VARIABLE)
            if job.flops_per_token is None
            else job.flops_per_token,
            "flops_convention": job.flops_convention,
            "recomputed_flops_per_token": job.recomputed_flops_per_token,
            "shape": _plain_mapping(job.shape),
        },
        "paced": _plain_mapping(job.paced),
        "git": None if commit is None else {"commit": commit},
        "config": _plain_mapping(job.config) or {},
        "environment": allowed_environment(environ),
        "versions": read_versions(),
        "seeds": _plain_mapping(job.seeds) or {},
        "hosts": None,
        "derived": None,
    }
    cleaned = hide_secrets(plain_copy(manifest))
    if not isinstance(cleaned, dict):  # pragma: no cover - plain keeps a dict a dict
        raise TypeError("a manifest is a mapping")
    return dict(cleaned)


def read_flops(environ: Mapping[str, str], variable: str) -> float | None:
    """Return the value of one of `VARIABLES`; None if it is not set.

    A value that is no positive number is reported in one line and ignored.
    """
    given = environ.get(variable)
    if not given:
        return None
    with contextlib.suppress(ValueError):
        if 0 < (flops := float(given)) < math.inf:
            return flops
    print_notice(f"{variable} must be {VARIABLES[variable]}, got {given[:40]!r}")
    return None


def hide_secrets(document: object, *, is_secret: bool = False) -> object:
    """Return a copy of a plain document with `HIDDEN` for each text whose name is a secret's.

    Numbers stay: ``num_tokens`` is none.
    """
    if isinstance(document, dict):
        return {
            name: hide_secrets(value, is_secret=is_secret or bool(SECRET_NAME.search(name)))
            for name, value in document.items()
        }
    if isinstance(document, list):
        return [hide_secrets(value, is_secret=is_secret) for value in document]
    return HIDDEN if is_secret and isinstance(document, str) and document else document


def add_derived(folder: Path, derived: Mapping[str, object]) -> None:
    """Add what the tracer derived to an existing manifest.

    The file is replaced by a rename, so that a reader sees the old or the new one. What the job
    declared is in other parts of the manifest and takes precedence.

    Args:
        derived: ``num_parameters``, `ModelFlops.derived`, ``unknown_flops``, ``device_name``,
            ``device_uuid``, ``dtype``, ``memory``, ``shape``, ``layout``, ``coords``; without
            unknown ones.

    Raises:
        OSError: The file could not be read or written; the old one remains.
    """
    path = folder / MANIFEST_FILE
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest["derived"] = {**(manifest.get("derived") or {}), **derived}
    write_json(path, plain_copy(manifest))


def read_device() -> dict[str, object]:
    """Return name and UUID of the device of this thread's computations, {} if there is none.

    Nothing is initialised: a device that the job has not used is unknown.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    device: dict[str, object] = {"device_name": str(properties.name)}
    uuid = getattr(properties, "uuid", None)
    return device if uuid is None else {**device, "device_uuid": str(uuid)}


def allowed_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that explain a job's speed. All others may contain secrets."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name.startswith(ENVIRONMENT_PREFIXES) or name in ENVIRONMENT_NAMES
    }


def read_versions() -> dict[str, object]:
    """Return versions of Python, torch, CUDA, NCCL and other packages that affect speed.

    Reads only what the job has imported or installed: nothing is imported, and no device is
    touched.
    """
    torch = sys.modules.get("torch")
    packages = {name: _installed(name) for name in PACKAGES}
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__) if torch is not None else _installed("torch"),
        "cuda": torch.version.cuda if torch is not None else None,
        "nccl": _nccl_version(torch),
        "packages": {name: text for name, text in packages.items() if text is not None},
    }


def count_parameters(model: Any) -> int | None:  # noqa: ANN401 - torch may be absent
    """Return the number of parameters, sharded ones counted whole; None if unknown."""
    if model is None:
        return None
    with contextlib.suppress(Exception):
        return sum(int(parameter.numel()) for parameter in model.parameters())
    return None


def _plain_mapping(mapping: Mapping[str, object] | None) -> object:
    return None if mapping is None else plain_copy(dict(mapping))


def _nccl_version(torch: Any) -> str | None:  # noqa: ANN401
    with contextlib.suppress(Exception):
        if torch is not None and torch.distributed.is_nccl_available():
            return ".".join(map(str, torch.cuda.nccl.version()))
    return None


def _installed(name: str) -> str | None:
    from importlib import metadata  # it imports the e-mail parser

    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def read_commit() -> str | None:
    """Return the commit of the working folder's checkout, 40 or 64 hex digits, from git's files.

    No program is started: the settings of a foreign repository name programs that git would run
    (``core.fsmonitor``, hooks, filters). Source: gitrepository-layout(5).

    Returns:
        None outside of a repository, before its first commit, or if git's files cannot be read.
    """
    with contextlib.suppress(OSError, ValueError):
        here = Path.cwd()
        for folder in (here, *here.parents):
            repository = _repository_of(folder)
            if repository is not None:
                return _resolve(repository, "HEAD")
    return None


def _repository_of(checkout: Path) -> Path | None:
    """Return git's folder of a checkout: ``.git``, or the one that the file ``.git`` names."""
    folder = checkout / ".git"
    if folder.is_file():
        folder = checkout / _read_git(folder).removeprefix("gitdir: ")
    return folder if (folder / "HEAD").is_file() else None


def _resolve(repository: Path, name: str) -> str | None:
    for _ in range(MAX_LINKS):
        text = _read_ref(repository, name)
        if COMMIT.fullmatch(text):
            return text
        name = text.removeprefix("ref: ")
        if not REF.fullmatch(name):
            return None
    return None


def _read_ref(repository: Path, name: str) -> str:
    """Return the content of a ref; "" if there is none. Branches are shared by linked checkouts."""
    shared = repository
    if (repository / "commondir").is_file():
        shared = repository / _read_git(repository / "commondir")
    for folder in (repository, shared):
        if (folder / name).is_file():
            return _read_git(folder / name)
    packed = re.search(
        rf"^(\w+) {re.escape(name)}$", _read_git(shared / "packed-refs"), re.MULTILINE
    )
    return packed[1] if packed else ""


def _read_git(path: Path) -> str:
    return os.fsdecode(read_regular_file(path, max_bytes=MAX_GIT_BYTES)).removesuffix("\n")

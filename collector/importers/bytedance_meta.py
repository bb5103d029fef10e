"""Sizes of a traced job, from the YAML file that comes with the trace."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankscope.tracer.spool import read_regular_file
from rankscope.tracer.topology import Layout

from ..errors import MetaError

if TYPE_CHECKING:
    from pathlib import Path

SIZES = ("dp_size", "dsp_size", "pp_size", "tp_size", "vpp_size")
MAX_META_BYTES = 1 << 16
MAX_BRACKETS = 64
"""The parser's time grows with the square of nested ones; a valid file has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMeta:
    """Content of a meta file."""

    path: Path
    layout: Layout
    trial_name: str
    document: dict[str, Any]
    """The file's plain values, for the manifest."""


def read_meta(path: Path | None, *, trace: Path) -> TraceMeta:
    """Read the sizes of a job.

    Args:
        path: The YAML file; None if none is given.
        trace: The trace that it belongs to, for the message.

    Raises:
        MetaError: There is no file, it cannot be read, a size is missing or not a whole number of
            at least 1, or the world size is not the product of the others.
    """
    if path is None:
        raise MetaError(
            f"{trace} does not have the sizes of the job:"
            " pass --meta FILE, a YAML file with dp_size, dsp_size, pp_size, tp_size,"
            " vpp_size and world_size"
        )
    try:
        document = _parsed(read_regular_file(path, max_bytes=MAX_META_BYTES).decode())
    except OSError as error:
        raise MetaError(f"cannot read the meta file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise MetaError(f"{path} is not YAML: pass the trace's meta file") from error
    if not isinstance(document, dict):
        raise MetaError(f"{path} has no sizes: it must have {', '.join(SIZES)} and world_size")
    sizes = {name: _size(document, name, path=path) for name in (*SIZES, "world_size")}
    layout = Layout(**{name.removesuffix("_size"): sizes[name] for name in SIZES})
    if layout.world_size != sizes["world_size"]:
        raise MetaError(
            f"{path}: world_size is {sizes['world_size']}, but dp x pp x tp x dsp"
            f" is {layout.world_size}: correct the file"
        )
    plain = {str(key): value for key, value in document.items() if isinstance(value, str | int)}
    trial_name = str(document.get("trial_name", ""))
    return TraceMeta(path=path, layout=layout, trial_name=trial_name, document=plain)


def _parsed(text: str) -> object:
    """Return the content of a YAML document.

    Raises:
        ValueError: It is not YAML, or has many brackets or aliases; a few aliases can expand to
            more than fits in memory.
        RecursionError: It is nested too deep.
    """
    import yaml

    if sum(map(text.count, "[{")) > MAX_BRACKETS:
        raise ValueError("brackets")
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ValueError("aliases")
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError("not YAML") from error


def _size(document: dict[Any, Any], name: str, *, path: Path) -> int:
    value = document.get(name)
    if value is None:
        raise MetaError(f"{path} has no {name}: add it")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 24:
        raise MetaError(f"{path}: {name} is {_shown(value)}, expected a whole number of at least 1")
    return value


def _shown(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to print numbers of more than 4,300 digits
        return "too large a number"

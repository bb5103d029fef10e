"""The sizes of a job that come beside its trace, in a small YAML file."""

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
"""The parser takes nested ones squared; the sizes stand in none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMeta:
    """What the meta file says."""

    path: Path
    layout: Layout
    trial_name: str
    document: dict[str, Any]
    """The file's plain values, for the manifest."""


def read_meta(path: Path | None, *, trace: Path) -> TraceMeta:
    """Read the sizes.

    Args:
        path: The YAML file, or None where the caller gave none.
        trace: The trace it belongs to, for the message.

    Raises:
        MetaError: None given, unreadable, a size missing or no whole number of
            at least 1, or a world size that is not the product of the others.
    """
    if path is None:
        raise MetaError(
            f"{trace} does not say how large the job was:"
            " pass --meta FILE, a YAML file with dp_size, dsp_size, pp_size, tp_size,"
            " vpp_size and world_size"
        )
    document = _load(path)
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


def _load(path: Path) -> dict[Any, Any]:
    try:
        text = read_regular_file(path, max_bytes=MAX_META_BYTES).decode()
        document = _parsed(text)
    except OSError as error:
        raise MetaError(f"cannot read the meta file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise MetaError(f"{path} is not YAML: pass the trace's meta file") from error
    if not isinstance(document, dict):
        raise MetaError(f"{path} holds no sizes: it must have {', '.join(SIZES)} and world_size")
    return document


def _parsed(text: str) -> object:
    """Return what a YAML document holds.

    Raises:
        ValueError: It is none, or has aliases (a few stand for more than memory holds) or
            many brackets.
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
        raise ValueError("no YAML") from error


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
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "too large a number"

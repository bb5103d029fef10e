"""Descriptions: rows of ``runs``, ``ranks``, ``groups``, ``events`` and ``manifests``.

They are made of a process's files. A manifest may come from another program or version: a field
that is missing or of another type is stored as unknown.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import NONE

from ..identity import MAX_INT32, MAX_INT64
from ..names import storable_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ..identity import Row
    from .process import ProcessFiles

LAYOUT_AXES = ("dp", "tp", "pp", "cp", "ep", "dsp", "vpp")
COORD_AXES = ("dp", "tp", "pp", "cp", "ep")

EXIT_LINE = -1
LOST_LINE = -2
STALLED_LINE = -3
CLOCK_LINE = -4
"""Line numbers of events that are not from ``events.jsonl``."""

MAX_FLOAT = sys.float_info.max
"""A larger integer of JSON can't be converted."""

GROUP_ID = re.compile(r"[0-9a-fA-F]{1,16}")
MAX_TEXT = 4_000
MAX_DATA_BYTES = 256 << 10

SQUARED = "flops_per_squared_length"

RUNNING, ENDED, FAILED, LOST = "running", "ended", "failed", "lost"

SETTINGS_PARTS = ("layout", "model", "paced", "git", "config", "environment", "versions", "device")
"""Parts of a manifest that are equal on all ranks of a healthy job. Seeds differ by rank."""

RANK_SETTINGS = frozenset({"device.uuid"})
"""Settings within these parts that differ by rank all the same."""

MAX_SETTINGS = 512
MAX_SETTINGS_DEPTH = 8


def run_row(
    files: ProcessFiles, *, states: Iterable[str], created_ns: int, ended_ns: int | None
) -> Row:
    """Return the row of one epoch of a run.

    Args:
        files: The process of the lowest rank, whose manifest is taken for the run.
        states: State of each process of the epoch.
        created_ns: Unix time at which the store first received data of the run.
        ended_ns: Unix time at which the last process ended; None while one runs.
    """
    manifest = files.manifest
    model = _object(manifest.get("model"))
    # Declared values take precedence. The number and its convention are from the same source.
    flops = model if _float(model.get("flops_per_token")) is not None else files.derived
    paced = manifest.get("paced")
    return {
        "run_id": files.run_id,
        "epoch": files.epoch,
        "created_ns": created_ns,
        "started_ns": _int(manifest.get("started_ns")),
        "ended_ns": ended_ns,
        "state": run_state(states),
        "source_format": "rankscope",
        "world_size": files.identity.world_size,
        "layout": _axes(_layout_source(files).get("layout"), LAYOUT_AXES, lowest=1),
        "model": json.dumps({**model, SQUARED: _float(flops.get(SQUARED))}),
        "flops_per_token": _float(flops.get("flops_per_token")),
        "flops_convention": _text(flops.get("flops_convention")),
        "paced": json.dumps(paced) if isinstance(paced, dict) else "",
        "manifest": json.dumps(manifest),
    }


def rank_row(
    files: ProcessFiles,
    *,
    state: str,
    exit_ns: int | None,
    dropped: Mapping[str, int],
    produced: int | None,
) -> Row:
    """Return the row of one process of a rank."""
    manifest, identity = files.manifest, files.identity
    device = _object(manifest.get("device"))
    return {
        "run_id": files.run_id,
        "epoch": files.epoch,
        "rank": identity.rank,
        "process": files.process,
        "host": storable_name(identity.host),
        "boot_id": identity.boot_id.hex(),
        "local_rank": _int(manifest.get("local_rank"), missing=NONE, limit=MAX_INT32),
        "pod": _text(manifest.get("pod")),
        "device_uuid": _text(device.get("uuid") or files.derived.get("device_uuid")),
        "device_name": _text(device.get("name") or files.derived.get("device_name")),
        "dtype": _text(device.get("dtype") or files.derived.get("dtype")),
        "peak_flops_per_s": _float(device.get("peak_flops_per_s")),
        **_coords(_layout_source(files), identity.world_size),
        "pid": identity.pid,
        "manifest_hash": hash_settings(manifest_settings(manifest)),
        "started_ns": _int(manifest.get("started_ns")),
        "exit_state": state,
        "exit_ns": exit_ns,
        "dropped": dict(dropped),
        "produced": produced,
    }


def group_rows(files: ProcessFiles, lines: Iterable[tuple[int, dict[str, Any]]]) -> list[Row]:
    """Return the rows of new lines of ``groups.jsonl``; skip lines without a valid group."""
    rows = []
    for _, line in lines:
        group_id, members = line.get("group_id"), _ranks(line.get("members"))
        if members is None or not isinstance(group_id, str) or not GROUP_ID.fullmatch(group_id):
            continue
        rows.append(
            {
                "run_id": files.run_id,
                "epoch": files.epoch,
                "group_id": int(group_id, 16),
                "kind": _text(line.get("kind")),
                "name": _text(line.get("name")),
                "members": sorted(members),
            }
        )
    return rows


def event_rows(files: ProcessFiles, lines: Iterable[tuple[int, dict[str, Any]]]) -> list[Row]:
    """Return the rows of new lines of ``events.jsonl``."""
    return [
        event_row(
            files,
            line=number,
            at_ns=_int(line.get("at_ns"), missing=0),
            kind=_text(line.get("kind")) or "other",
            text=line.get("text"),
            data=line.get("data"),
        )
        for number, line in lines
    ]


def event_row(
    files: ProcessFiles, *, line: int, at_ns: int | None, kind: str, text: object, data: object
) -> Row:
    """Return the row of one event."""
    document = json.dumps(data if isinstance(data, dict) else {})
    return {
        "run_id": files.run_id,
        "epoch": files.epoch,
        "rank": files.identity.rank,
        "at_ns": at_ns or 0,
        "kind": kind,
        "text": _clean(text if isinstance(text, str) else ""),
        "data": document if len(document) <= MAX_DATA_BYTES else "{}",
        "process": files.process,
        "line": line,
    }


def exit_event(files: ProcessFiles, record: Mapping[str, Any]) -> Row:
    """Return the event of a process that wrote an exit record."""
    exception = _object(record.get("exception"))
    text = f"{_clean(exception.get('type'))}: {_clean(exception.get('message'))}"
    return event_row(
        files,
        line=EXIT_LINE,
        at_ns=_int(record.get("at_ns"), missing=0),
        kind="exit",
        text=text if exception else exit_state(record),
        data={"state": exit_state(record), "exception": exception or None},
    )


def exit_state(record: Mapping[str, Any]) -> str:
    """Return the state of an exit record; an unknown state counts as failed."""
    return ENDED if record.get("state") == ENDED else FAILED


def run_state(states: Iterable[str]) -> str:
    """Return the state of an epoch: running if any process runs, else the worst final state."""
    found = set(states)
    for state in (RUNNING, FAILED, LOST):
        if state in found:
            return state
    return ENDED


def manifest_row(run_id: str, manifest: Mapping[str, Any]) -> Row:
    """Return the row of table ``manifests`` of a manifest."""
    settings = manifest_settings(manifest)
    return {
        "run_id": run_id,
        "manifest_hash": hash_settings(settings),
        "settings": settings,
    }


def manifest_settings(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a manifest by name, as ``environment.NCCL_DEBUG``, sorted.

    Null and empty values are unknown and left out.
    """
    found = {
        storable_name(name): storable_name(text)
        for part in SETTINGS_PARTS
        for name, text in _flat(part, manifest.get(part), depth=0)
        if name not in RANK_SETTINGS
    }
    return dict(sorted(found.items())[:MAX_SETTINGS])


def hash_settings(settings: Mapping[str, str]) -> str:
    """Return a hash of settings."""
    text = json.dumps(settings, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()


def _layout_source(files: ProcessFiles) -> Mapping[str, Any]:
    """Return the source of layout and position: the job's declaration, else the tracer's."""
    manifest = files.manifest
    is_declared = any(isinstance(manifest.get(key), dict) for key in ("layout", "coords"))
    return manifest if is_declared else files.derived


def _coords(source: Mapping[str, Any], world_size: int) -> dict[str, int]:
    """Return the rank's position on each axis; `NONE` if unknown."""
    declared = _axes(source.get("coords"), COORD_AXES, lowest=0)
    sizes = _axes(source.get("layout"), LAYOUT_AXES, lowest=1)
    if world_size > 1 and not sizes and not declared:
        return dict.fromkeys(COORD_AXES, NONE)
    return {axis: declared.get(axis, 0 if sizes.get(axis, 1) == 1 else NONE) for axis in COORD_AXES}


def _ranks(value: object) -> list[int] | None:
    """Return a list of global ranks; None if it is anything else."""
    if not isinstance(value, list):
        return None
    ranks = [_int(member, missing=NONE, limit=MAX_INT32) for member in value]
    found = [rank for rank in ranks if rank is not None and rank >= 0]
    return found if len(found) == len(value) else None


def _axes(value: object, names: tuple[str, ...], *, lowest: int) -> dict[str, int]:
    sizes = {name: _int(_object(value).get(name), limit=MAX_INT32) for name in names}
    return {name: size for name, size in sizes.items() if size is not None and size >= lowest}


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return storable_name(value) if isinstance(value, str) else ""


def _clean(value: object) -> str:
    """Return a text with line breaks kept, as in a traceback, and other controls escaped."""
    text = value if isinstance(value, str) else ""
    lines = text[:MAX_TEXT].split("\n")
    return "\n".join(
        "".join(storable_name(line[at : at + 60]) for at in range(0, len(line), 60))
        for line in lines
    )


def _int(value: object, *, missing: int | None = None, limit: int = MAX_INT64) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > limit:
        return missing
    return value


def _float(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_FLOAT:
        return float(value)
    return None


def _flat(name: str, value: object, *, depth: int) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each leaf below ``name``; a list is one leaf."""
    if isinstance(value, dict) and depth < MAX_SETTINGS_DEPTH:
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner, depth=depth + 1)
    elif value is not None and value not in ("", {}, []):
        yield name, value if isinstance(value, str) else json.dumps(value, sort_keys=True)

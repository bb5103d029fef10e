"""Descriptions: rows of ``runs``, ``ranks``, ``groups``, ``events``, ``kernels`` and ``manifests``.

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

from ..bounds import (
    COORD_AXES,
    MAX_AXIS_SIZE,
    MAX_WORLD_SIZE,
    find_layout_problem,
    find_members_problem,
    find_problems,
    keep_valid,
)
from ..identity import MAX_INT64
from ..names import storable_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ..identity import Row
    from .process import ProcessFiles

EXIT_LINE = -1
LOST_LINE = -2
STALLED_LINE = -3
CLOCK_LINE = -4
INVALID_LINE = -5
"""Line numbers of events that are not from ``events.jsonl``."""

INVALID = "invalid-description"
IMPORT_NOTE = "import-note"
"""Kinds of events whose texts are warnings: what was left out, and what an import assumed."""

MAX_FLOAT = sys.float_info.max
"""A larger integer of JSON can't be converted."""

GROUP_ID = re.compile(r"[0-9a-fA-F]{1,16}")
MAX_TEXT = 4_000
MAX_DATA_BYTES = 256 << 10

KERNEL_NUMBERS = ("step", "num", "num_names", "total_ns", "max_ns", "flops", "num_bytes")

FLOPS_NUMBERS = (
    "flops_per_squared_length",
    "flops_per_windowed_length",
    "recomputed_flops_per_token",
    "recomputed_attention_ratio",
)
"""Of the model, beside ``flops_per_token``, from the same source."""

RUNNING, ENDED, FAILED, LOST = "running", "ended", "failed", "lost"

UNKNOWN = ""
"""State of a process of which it is unknown what became: another program recorded it."""

SETTINGS_PARTS = ("layout", "model", "paced", "git", "config", "environment", "versions", "device")
"""Parts of a manifest that are equal on all ranks of a healthy job. Seeds differ by rank."""

RANK_SETTINGS = frozenset({"device.uuid"})
"""Settings within these parts that differ by rank all the same."""

MAX_SETTINGS = 512
MAX_SETTINGS_DEPTH = 8


def run_row(
    files: ProcessFiles, *, states: Iterable[str], created_ns: int, ended_ns: int | None
) -> Row:
    """Return the row of one epoch of a run, without what is out of bounds.

    Args:
        files: The process of the lowest rank, whose manifest is taken for the run.
        states: State of each process of the epoch.
        created_ns: Unix time at which the store first received data of the run.
        ended_ns: Unix time at which the last process ended; None while one runs.
    """
    row = {
        "run_id": files.run_id,
        "epoch": files.epoch,
        "created_ns": created_ns,
        "ended_ns": ended_ns,
        "state": run_state(states),
        "source_format": "rankscope",
        **_declared_run(files),
    }
    return keep_valid("runs", row)[0] or row


def _declared_run(files: ProcessFiles) -> Row:
    """Return what a manifest declares of its run, in bounds or not."""
    manifest = files.manifest
    model, layout = _object(manifest.get("model")), _layout_source(files).get("layout")
    # Declared values take precedence. The number and its convention are from the same source.
    derived = files.derived
    flops = model if _float(model.get("flops_per_token")) is not None else derived
    paced = manifest.get("paced")
    return {
        "started_ns": _int(manifest.get("started_ns")),
        "world_size": files.identity.world_size,
        "layout": {} if layout is None else layout,
        "model": json.dumps(
            {
                **model,
                **{name: _float(flops.get(name), is_zero_known=True) for name in FLOPS_NUMBERS},
                "num_parameters": model.get("num_parameters") or derived.get("num_parameters"),
                "shape": _object(model.get("shape") or derived.get("shape")),
                "unknown_flops": _text(derived.get("unknown_flops")),
            }
        ),
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
    row = {
        "run_id": files.run_id,
        "epoch": files.epoch,
        "rank": identity.rank,
        "process": files.process,
        "host": storable_name(identity.host),
        "boot_id": identity.boot_id.hex(),
        "local_rank": _int(manifest.get("local_rank"), missing=NONE),
        "pod": _text(manifest.get("pod")),
        "device_uuid": _text(device.get("uuid") or files.derived.get("device_uuid")),
        "device_name": _text(device.get("name") or files.derived.get("device_name")),
        "dtype": _text(device.get("dtype") or files.derived.get("dtype")),
        "peak_flops_per_s": _float(device.get("peak_flops_per_s")),
        "memory": json.dumps(_object(files.derived.get("memory"))),
        **_coords(_layout_source(files), identity.world_size),
        "pid": identity.pid,
        "manifest_hash": hash_settings(manifest_settings(manifest)),
        "started_ns": _int(manifest.get("started_ns")),
        "exit_state": state,
        "exit_ns": exit_ns,
        "dropped": dict(dropped),
        "produced": produced,
    }
    return keep_valid("ranks", row)[0] or row


def group_rows(
    files: ProcessFiles, lines: Iterable[tuple[int, dict[str, Any]]]
) -> tuple[list[Row], list[str]]:
    """Return the rows of new lines of ``groups.jsonl``, and why other lines are left out."""
    rows, problems = [], []
    for number, line in lines:
        problem = _find_group_problem(files, line)
        if problem is not None:
            problems.append(f"the group in line {number + 1} of groups.jsonl: {problem}")
            continue
        rows.append(
            {
                "run_id": files.run_id,
                "epoch": files.epoch,
                "group_id": int(line["group_id"], 16),
                "kind": _text(line.get("kind")),
                "name": _text(line.get("name")),
                "members": sorted(line["members"]),
            }
        )
    return rows, problems


def _find_group_problem(files: ProcessFiles, line: Mapping[str, Any]) -> str | None:
    group_id, members = line.get("group_id"), line.get("members")
    if not isinstance(group_id, str) or not GROUP_ID.fullmatch(group_id):
        return "its group_id is not a hexadecimal number of 1 to 16 digits"
    problem = find_members_problem(members)
    if problem is None and isinstance(members, list) and max(members) >= _world_size(files):
        return f"rank {max(members)} is beyond the world size of {_world_size(files)}"
    return problem


class DescriptionProblems:
    """Descriptions of a process that are left out as out of bounds; each is reported once."""

    def __init__(self, files: ProcessFiles) -> None:
        self._files = files
        self._checked: dict[str, Any] | None = None
        self._has_wrong_line = False
        self._reported: list[str] = []

    def poll(self, wrong_lines: list[str]) -> list[Row]:
        """Return the event of new problems, if there are any.

        Args:
            wrong_lines: Why lines of groups and events are left out; only the first is reported.
        """
        problems = [] if self._has_wrong_line else wrong_lines[:1]
        self._has_wrong_line |= bool(wrong_lines)
        if self._files.derived is not self._checked:
            self._checked = self._files.derived
            problems += _find_manifest_problems(self._files)
        new = [text for text in problems if text not in self._reported]
        if not new:
            return []
        line = INVALID_LINE - len(self._reported)
        self._reported += new
        return [
            event_row(
                self._files,
                line=line,
                at_ns=self._files.identity.anchor_unix_ns,
                kind=INVALID,
                text=f"left out as invalid: {'; '.join(new)}",
                data={},
            )
        ]


def _find_manifest_problems(files: ProcessFiles) -> list[str]:
    """Return what is out of bounds in the manifest of a process, one text for each part."""
    by_name = find_problems("runs", _declared_run(files))
    problems = [f"{name}: {problem}" for name, problem in by_name.items()]
    for part in ("model", "paced"):
        if not isinstance(files.manifest.get(part), dict | None):
            problems += [f"{part} is not an object"]
    problem = _find_coords_problem(_layout_source(files))
    return problems if problem is None else [*problems, problem]


def event_rows(
    files: ProcessFiles, lines: Iterable[tuple[int, dict[str, Any]]]
) -> tuple[list[Row], list[str]]:
    """Return the rows of new lines of ``events.jsonl``, and why other lines are left out."""
    rows, problems = [], []
    for number, line in lines:
        row = event_row(
            files,
            line=number,
            at_ns=_int(line.get("at_ns"), missing=0),
            kind=_text(line.get("kind")) or "other",
            text=line.get("text"),
            data=line.get("data"),
        )
        found = find_problems("events", row)
        if found:
            problems.append(f"the event in line {number + 1}: {'; '.join(found.values())}")
        else:
            rows.append(row)
    return rows, problems


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


def kernel_rows(
    files: ProcessFiles, lines: Iterable[tuple[int, dict[str, Any]]]
) -> tuple[list[Row], list[str]]:
    """Return the rows of new lines of ``kernels.jsonl``, and why other lines are left out."""
    rows, problems = [], []
    for number, line in lines:
        row = {
            "run_id": files.run_id,
            "epoch": files.epoch,
            "rank": files.identity.rank,
            **{name: _text(line.get(name)) for name in ("phase", "stream", "name", "dtype")},
            **{name: line.get(name) for name in KERNEL_NUMBERS},
        }
        found = find_problems("kernels", row)
        if found:
            problems.append(f"the kernel in line {number + 1}: {next(iter(found.items()))}")
        else:
            rows.append(row)
    return rows, problems


def exit_event(files: ProcessFiles, record: Mapping[str, Any]) -> Row:
    """Return the event of a process that wrote an exit record."""
    exception = _object(record.get("exception"))
    text = f"{_clean(exception.get('type'))}: {_clean(exception.get('message'))}"
    return event_row(
        files,
        line=EXIT_LINE,
        at_ns=_int(record.get("at_ns"), missing=0),
        kind="exit",
        text=text if exception else exit_state(record) or "unknown",
        data={"state": exit_state(record), "exception": exception or None},
    )


def exit_state(record: Mapping[str, Any]) -> str:
    """Return the state of an exit record; one that is not valid counts as failed."""
    return {ENDED: ENDED, "unknown": UNKNOWN}.get(str(record.get("state")), FAILED)


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
    unknown = dict.fromkeys(COORD_AXES, NONE)
    if _find_coords_problem(source) is not None:
        return unknown
    declared, sizes = _object(source.get("coords")), _object(source.get("layout"))
    if world_size > 1 and not sizes and not declared:
        return unknown
    return {axis: declared.get(axis, 0 if sizes.get(axis, 1) == 1 else NONE) for axis in COORD_AXES}


def _find_coords_problem(source: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a declared position; also if the sizes of the axes are wrong."""
    coords, layout = source.get("coords"), source.get("layout")
    if layout is not None and find_layout_problem(layout) is not None:
        return "coords: the layout is left out"
    if coords is None:
        return None
    if not isinstance(coords, dict):
        return "coords is not an object"
    for axis, position in coords.items():
        size = MAX_AXIS_SIZE if layout is None else layout.get(axis, 1)
        if axis not in COORD_AXES or type(position) is not int or not 0 <= position < size:
            return f"coords: {storable_name(str(axis))} is not below its size in the layout"
    return None


def _world_size(files: ProcessFiles) -> int:
    return files.identity.world_size or MAX_WORLD_SIZE


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


def _int(value: object, *, missing: int | None = None) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > MAX_INT64:
        return missing
    return value


def _float(value: object, *, is_zero_known: bool = False) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 < value <= MAX_FLOAT or (value == 0 and is_zero_known) else None


def _flat(name: str, value: object, *, depth: int) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each leaf below ``name``; a list is one leaf."""
    if isinstance(value, dict) and depth < MAX_SETTINGS_DEPTH:
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner, depth=depth + 1)
    elif value is not None and value not in ("", {}, []):
        yield name, value if isinstance(value, str) else json.dumps(value, sort_keys=True)

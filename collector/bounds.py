"""Bounds of what a job declares about itself: its size, its layout, its ranks and groups.

The collector checks each description against them where it enters, and again where it is read: a
store may hold rows of an older version. Without bounds, one number of one run would decide how
much memory the analysis of all runs takes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import NONE

from .identity import MAX_INT32, MAX_INT64

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .identity import Row

LAYOUT_AXES = ("dp", "tp", "pp", "cp", "ep", "dsp", "vpp")
COORD_AXES = ("dp", "tp", "pp", "cp", "ep")
OVERLAID_AXES = frozenset({"ep", "vpp"})
"""Axes that are no factor of the world size."""

MAX_WORLD_SIZE = 1 << 24
MAX_AXIS_SIZE = 1 << 20
MAX_DEPTH = 32
"""Depth of a JSON document about a model or a pace; the tracer's own have two levels."""

MAX_MANIFEST_DEPTH = 100
MAX_DOCUMENT_CHARS = 256 << 10
MAX_MANIFEST_CHARS = 4 << 20
MAX_FLOPS = 1e24
"""Of one token, and of one device per second; the largest that exist are some 1e13 and 1e16."""

MAX_SUM = 1 << 62
"""Of the counts, times, FLOPs and bytes of the kernels of one step."""

OWN_KINDS = ("alert", "control-request")
"""Prefixes of the kinds of events that the server alone writes: one that a job could write would
reach the receivers of alerts, silence them, or request something of the ranks."""

MAX_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True)
class Bound:
    """Bound of one column."""

    find_problem: Callable[[Any], str | None]
    """Returns what is wrong with a value; None if nothing is."""

    unknown: Any = None
    """Value for a wrong one."""

    is_needed: bool = False
    """Whether a row without a valid value is left out."""

    schema: Mapping[str, Any] | None = None
    """The bound in JSON Schema, as far as it can be; None: that of the column's type."""


def whole(low: int, high: int, *, unknown: int = NONE, is_needed: bool = False) -> Bound:
    """Return the bound of an integer from ``low`` to ``high``."""

    def find_problem(value: object) -> str | None:
        if type(value) is int and low <= value <= high:
            return None
        return f"{_shown(value)} is not an integer from {low:,} to {high:,}"

    schema = {"type": "integer", "minimum": low, "maximum": high}
    return Bound(find_problem, unknown, is_needed, schema)


def _find_sum_problem(value: object) -> str | None:
    return None if value is None else SUM.find_problem(value)


def find_layout_problem(value: object) -> str | None:
    """Return what is wrong with the sizes of the parallel axes."""
    if not isinstance(value, dict):
        return f"{_shown(value)} is not an object"
    for axis, size in value.items():
        if axis not in LAYOUT_AXES:
            return f"{_shown(axis)} is not one of the axes {', '.join(LAYOUT_AXES)}"
        if type(size) is not int or not 1 <= size <= MAX_AXIS_SIZE:
            return f"{axis} is {_shown(size)}, not an integer from 1 to {MAX_AXIS_SIZE:,}"
    product = math.prod(size for axis, size in value.items() if axis not in OVERLAID_AXES)
    if product > MAX_WORLD_SIZE:
        return f"the product of the axes is {product:,}, more than {MAX_WORLD_SIZE:,} ranks"
    return None


def find_members_problem(value: object) -> str | None:
    """Return what is wrong with the ranks of a group."""
    if not isinstance(value, list) or not value:
        return f"{_shown(value)} is not a list of ranks"
    for member in value:
        if type(member) is not int or not 0 <= member < MAX_WORLD_SIZE:
            return f"{_shown(member)} is not a rank from 0 to {MAX_WORLD_SIZE - 1:,}"
    return None


def find_document_problem(
    text: str, *, max_depth: int = MAX_DEPTH, max_chars: int = MAX_DOCUMENT_CHARS
) -> str | None:
    """Return what is wrong with the text of a JSON object; "" is allowed."""
    if not text:
        return None
    if len(text) > max_chars:
        return f"the document has {len(text):,} characters, more than {max_chars:,}"
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return "the document is not JSON"
    if not isinstance(document, dict):
        return f"{_shown(document)} is not an object"
    if not is_flat(document, max_depth=max_depth):
        return f"the document is nested deeper than {max_depth}"
    return None


def is_flat(document: object, *, max_depth: int) -> bool:
    """Return whether a parsed document is nested at most ``max_depth`` deep.

    A deeper one may be parsed just below the interpreter's recursion limit and exceed the limit
    when it is serialized.
    """
    level: list[Any] = [document]
    for _ in range(max_depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]  # fmt: skip
        if not level:
            return True
    return False


def _find_flops_problem(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_FLOPS:
        return None
    return f"{_shown(value)} is not a number above 0 and at most {MAX_FLOPS:.0e}"


def _find_manifest_problem(text: str) -> str | None:
    return find_document_problem(text, max_depth=MAX_MANIFEST_DEPTH, max_chars=MAX_MANIFEST_CHARS)


def _find_kind_problem(value: object) -> str | None:
    if isinstance(value, str) and not value.startswith(OWN_KINDS):
        return None
    return f"only the server writes events of kind {_shown(value)}"


def _find_time_problem(value: object) -> str | None:
    if value is None or (type(value) is int and 0 <= value <= MAX_INT64):
        return None
    return f"{_shown(value)} is not a time in ns since 1970"


EPOCH = whole(0, MAX_INT32, is_needed=True)
RANK = whole(0, MAX_WORLD_SIZE - 1, is_needed=True)
RANK_OR_NONE = whole(NONE, MAX_WORLD_SIZE - 1, is_needed=True)
LOCAL = whole(NONE, MAX_WORLD_SIZE - 1)
POSITION = whole(NONE, MAX_AXIS_SIZE - 1)
NULL = {"type": "null"}
SUM = whole(0, MAX_SUM, is_needed=True)
SUM_OR_NONE = Bound(_find_sum_problem, schema={"anyOf": [SUM.schema, NULL]})
FLOPS = Bound(
    _find_flops_problem,
    schema={"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": MAX_FLOPS}, NULL]},
)
TIME = Bound(
    _find_time_problem,
    # A float of JSON Schema cannot hold the number before a power of two.
    schema={"anyOf": [{"type": "integer", "minimum": 0, "exclusiveMaximum": MAX_INT64 + 1}, NULL]},
)
CREATED = Bound(_find_time_problem, 0, schema=TIME.schema)
LAYOUT = Bound(
    find_layout_problem,
    {},
    schema={
        "type": "object",
        "properties": {
            axis: {"type": "integer", "minimum": 1, "maximum": MAX_AXIS_SIZE}
            for axis in LAYOUT_AXES
        },
        "additionalProperties": False,
    },
)
MEMBERS = Bound(
    find_members_problem,
    is_needed=True,
    schema={
        "type": "array",
        "minItems": 1,
        "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": MAX_WORLD_SIZE},
    },
)
KIND = Bound(
    _find_kind_problem,
    is_needed=True,
    schema={"type": "string", "pattern": f"^(?!{'|'.join(OWN_KINDS)})"},
)
DOCUMENT = Bound(find_document_problem, "")
MANIFEST = Bound(_find_manifest_problem, "")

BOUNDS: dict[str, dict[str, Bound]] = {
    "runs": {
        "epoch": EPOCH,
        "created_ns": CREATED,
        "started_ns": TIME,
        "ended_ns": TIME,
        "world_size": whole(1, MAX_WORLD_SIZE, unknown=0),
        "layout": LAYOUT,
        "model": DOCUMENT,
        "flops_per_token": FLOPS,
        "paced": DOCUMENT,
        "manifest": MANIFEST,
    },
    "ranks": {
        "epoch": EPOCH,
        "rank": RANK,
        "local_rank": LOCAL,
        "peak_flops_per_s": FLOPS,
        "memory": DOCUMENT,
        **dict.fromkeys(COORD_AXES, POSITION),
        "started_ns": TIME,
        "exit_ns": TIME,
    },
    "groups": {"epoch": EPOCH, "members": MEMBERS},
    "events": {
        "epoch": EPOCH,
        "rank": RANK_OR_NONE,
        "kind": KIND,
        "data": MANIFEST,
    },
    "kernels": {
        "epoch": EPOCH,
        "rank": RANK,
        "step": whole(NONE, MAX_INT32, is_needed=True),
        **dict.fromkeys(("num", "num_names"), whole(1, MAX_SUM, is_needed=True)),
        **dict.fromkeys(("total_ns", "max_ns"), SUM),
        **dict.fromkeys(("flops", "num_bytes"), SUM_OR_NONE),
    },
    "heartbeats": {
        "epoch": EPOCH,
        "rank": RANK,
        "local_rank": LOCAL,
        "step": whole(NONE, MAX_INT32),
    },
    "processes": {"epoch": EPOCH, "rank": RANK, "world_size": whole(0, MAX_WORLD_SIZE, unknown=0)},
}
"""Bounds of the columns of each table of descriptions."""


def find_problems(table: str, row: Mapping[str, Any]) -> dict[str, str]:
    """Return what is wrong with a row of a table, by column; a missing column is not wrong."""
    problems = {
        name: bound.find_problem(row[name])
        for name, bound in BOUNDS.get(table, {}).items()
        if name in row
    }
    return {name: problem for name, problem in problems.items() if problem is not None}


def keep_valid(table: str, row: Row) -> tuple[Row | None, dict[str, str]]:
    """Return a row with its wrong values unknown, and what was wrong by column.

    The row is None if it means nothing without a wrong value.
    """
    problems = find_problems(table, row)
    if not problems:
        return row, problems
    bounds = BOUNDS[table]
    if any(bounds[name].is_needed for name in problems):
        return None, problems
    return {**row, **{name: bounds[name].unknown for name in problems}}, problems


def _shown(value: object) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."

"""Descriptions: the tables that `POST /v1/rows/TABLE` takes, their columns, types and bounds.

If a row is invalid, the whole request is rejected, with the row's number: descriptions are few, and
their sender can correct them.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..bounds import BOUNDS, find_problems
from ..errors import RunNameError, WireError
from ..identity import MAX_INT64, RUN_NAME, check_run_name
from ..names import storable_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..identity import Row

MAX_MEMBERS = 65_536
MAX_ENTRIES = 512
MAX_TEXT_LETTERS = 4 << 20
"""A manifest lists the hosts of the whole job, and an event may hold the stacks of all threads."""


@dataclass(frozen=True, slots=True)
class Check:
    """Type of a column's values."""

    take: Callable[[Any], Any]
    """Returns the value to store; raises `ValueError` if it has another type."""

    schema: dict[str, Any]
    """The same type in JSON Schema."""


def integer(bits: int, *, signed: bool = True) -> Check:
    """Return the check for an integer of ``bits`` bits; as in JSON Schema, 2.0 is an integer."""
    low = -(1 << (bits - 1)) if signed else 0
    high = (1 << (bits - 1 if signed else bits)) - 1

    def take(value: Any) -> int:  # noqa: ANN401  # any JSON value
        is_whole = type(value) is int or (type(value) is float and value.is_integer())
        if not is_whole or not low <= value <= high:
            raise ValueError(f"expected an integer from {low} to {high}")
        return int(value)

    # FastAPI writes bounds as floats, which can hold a power of two but not the number before it.
    return Check(take, {"type": "integer", "minimum": low, "exclusiveMaximum": high + 1})


def optional(check: Check) -> Check:
    """Return the check for a value of this type or null."""
    return Check(
        lambda value: None if value is None else check.take(value),
        {"anyOf": [check.schema, {"type": "null"}]},
    )


def mapping(check: Check) -> Check:
    """Return the check for an object whose values have this type."""

    def take(value: Any) -> dict[str, Any]:  # noqa: ANN401  # as above
        if not isinstance(value, dict) or len(value) > MAX_ENTRIES:
            raise ValueError(f"expected an object of at most {MAX_ENTRIES} entries")
        return {_word(name): check.take(inner) for name, inner in value.items()}

    return Check(
        take,
        {
            "type": "object",
            "maxProperties": MAX_ENTRIES,
            "additionalProperties": check.schema,
        },
    )


def _float(value: Any) -> float:  # noqa: ANN401  # as above
    if type(value) in {int, float}:
        with suppress(OverflowError):  # an integer may be larger than any float
            number = float(value)
            if math.isfinite(number):
                return number
    raise ValueError("expected a finite number")


def _word(value: Any) -> str:  # noqa: ANN401  # as above
    """Return a name that is safe to store, as the tail writes it."""
    if not isinstance(value, str):
        raise ValueError("expected a string")  # noqa: TRY004  # one error type for all checks
    return storable_name(value)


def _text(value: Any) -> str:  # noqa: ANN401  # as above
    """Return a text that may have line breaks, such as a traceback or a document."""
    if not isinstance(value, str) or len(value) > MAX_TEXT_LETTERS:
        raise ValueError(f"expected a string of at most {MAX_TEXT_LETTERS} characters")
    kept = "".join(letter if letter in "\n\t" or letter.isprintable() else "�" for letter in value)
    return kept.encode("utf-8", "replace").decode()


def _members(value: Any) -> list[int]:  # noqa: ANN401  # as above
    if not isinstance(value, list) or len(value) > MAX_MEMBERS:
        raise ValueError(f"expected a list of at most {MAX_MEMBERS} ranks")
    return [INT32.take(member) for member in value]


def _bool(value: Any) -> bool:  # noqa: ANN401  # as above
    if not isinstance(value, bool):
        raise ValueError("expected true or false")  # noqa: TRY004  # one error type for all checks
    return value


def _revision(value: Any) -> int:  # noqa: ANN401  # as above
    revision: int = UINT64.take(value)
    if revision > MAX_INT64:
        raise WireError(400, f"revision {revision} is no time in ns: expected at most {MAX_INT64}")
    return revision


INT32, INT64, UINT64 = integer(32), integer(64), integer(64, signed=False)
REVISION = Check(_revision, {**UINT64.schema, "exclusiveMaximum": MAX_INT64 + 1})
"""Unix time in ns, by which the newest row of one identity is found."""

OPT_INT64 = optional(INT64)
BOOL = Check(_bool, {"type": "boolean"})
FLOAT = Check(_float, {"type": "number"})
OPT_FLOAT = optional(FLOAT)
WORD = Check(_word, {"type": "string"})
RUN = Check(_word, {"type": "string", "pattern": f"^{RUN_NAME.pattern}$"})
RUN_OR_NONE = Check(_word, {"type": "string", "pattern": f"^({RUN_NAME.pattern})?$"})
TEXT = Check(_text, {"type": "string", "maxLength": MAX_TEXT_LETTERS})
MEMBERS = Check(_members, {"type": "array", "maxItems": MAX_MEMBERS, "items": INT32.schema})


MAX_ROWS = 10_000
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """Columns of a table that takes descriptions."""

    identity: dict[str, Check]
    """Required columns."""

    others: dict[str, Check]
    """Optional columns; one that is left out takes the table's default."""


ROW_TABLES: dict[str, RowTable] = {
    "runs": RowTable(
        identity={"run_id": RUN, "epoch": INT32, "revision": REVISION},
        others={
            "created_ns": INT64,
            "started_ns": OPT_INT64,
            "ended_ns": OPT_INT64,
            "state": WORD,
            "source_format": WORD,
            "world_size": INT32,
            "layout": mapping(INT32),
            "model": TEXT,
            "flops_per_token": OPT_FLOAT,
            "flops_convention": WORD,
            "paced": TEXT,
            "manifest": TEXT,
        },
    ),
    "ranks": RowTable(
        identity={
            "run_id": RUN,
            "epoch": INT32,
            "rank": INT32,
            "process": WORD,
            "revision": REVISION,
        },
        others={
            "host": WORD,
            "boot_id": WORD,
            "local_rank": INT32,
            "pod": WORD,
            "device_uuid": WORD,
            "device_name": WORD,
            "dtype": WORD,
            "peak_flops_per_s": OPT_FLOAT,
            **dict.fromkeys(("dp", "tp", "pp", "cp", "ep"), INT32),
            "switch": WORD,
            "rack": WORD,
            "rail": WORD,
            "pid": INT64,
            "manifest_hash": WORD,
            "started_ns": OPT_INT64,
            "exit_state": WORD,
            "exit_ns": OPT_INT64,
            "dropped": mapping(UINT64),
            "produced": optional(UINT64),
        },
    ),
    "groups": RowTable(
        identity={"run_id": RUN, "epoch": INT32, "group_id": UINT64},
        others={"kind": WORD, "name": WORD, "members": MEMBERS},
    ),
    "events": RowTable(
        identity={"run_id": RUN, "epoch": INT32, "rank": INT32, "at_ns": INT64, "kind": WORD},
        others={"text": TEXT, "data": TEXT, "process": WORD, "line": INT64},
    ),
    "manifests": RowTable(
        identity={"run_id": RUN, "manifest_hash": WORD}, others={"settings": mapping(TEXT)}
    ),
    "clock": RowTable(
        identity={"host": WORD, "boot_id": WORD, "at_ns": INT64, "offset_ns": INT64},
        others={"drift_ppb": INT64, "clock_error_ns": INT64},
    ),
    "samples": RowTable(
        identity={"host": WORD, "device": INT32, "at_ns": INT64, "name": WORD, "value": FLOAT},
        others={"run_id": RUN_OR_NONE},
    ),
    "heartbeats": RowTable(
        identity={
            "run_id": RUN,
            "epoch": INT32,
            "rank": INT32,
            "host": WORD,
            "at_ns": INT64,
            "state": WORD,
        },
        others={
            "pid": INT64,
            **dict.fromkeys(("address", "pod", "hardware"), WORD),
            **dict.fromkeys(("local_rank", "step"), INT32),
            **dict.fromkeys(("rdma_sent_bytes", "rdma_received_bytes"), OPT_INT64),
        },
    ),
}
"""The tables of `POST /v1/rows/TABLE`."""

PROCESSES = "processes"
QUESTIONS: dict[str, RowTable] = {
    PROCESSES: RowTable(
        identity={"run_id": RUN, "epoch": INT32, "rank": INT32, "process": WORD},
        others={
            **dict.fromkeys(("host", "layout", "job"), WORD),
            "world_size": INT32,
            "started_ns": INT64,
            "first_step": optional(INT32),
            "has_ended": BOOL,
        },
    ),
}
"""Rows that are not stored: the answer says under which run and epoch each process is."""

HOST_TABLES = frozenset({"clock", "samples"})
"""Tables whose rows describe a host, and need no run."""


def parse_rows(table: str, body: bytes) -> list[Row]:
    """Return the rows of a request, each column checked.

    Raises:
        WireError: 400 if the body is not JSON, 404 if the table takes no rows, 413 if there are
            too many rows, 422 if a row is invalid.
    """
    if table not in ROW_TABLES | QUESTIONS:
        raise WireError(404, f"this table takes no rows; these do: {', '.join(ROW_TABLES)}")
    document = _document(body)
    if document.get("schema") != SCHEMA or not isinstance(document.get("rows"), list):
        raise WireError(
            422,
            f'expected {{"schema": {SCHEMA}, "rows": [...]}}; this collector reads schema'
            f" {SCHEMA} to {SCHEMA}",
            supported=(SCHEMA, SCHEMA),
        )
    rows = document["rows"]
    if len(rows) > MAX_ROWS:
        raise WireError(413, f"{len(rows)} rows are more than {MAX_ROWS}: send fewer at once")
    return [_checked_row(table, row, place) for place, row in enumerate(rows)]


def request_schema(table: str) -> dict[str, Any]:
    """Return the JSON Schema of a request with rows of ``table``; unknown columns are ignored."""
    known = (ROW_TABLES | QUESTIONS)[table]
    columns = known.identity | known.others
    row = {
        "type": "object",
        "required": list(known.identity),
        "properties": {
            name: _schema_of(table, name) or check.schema for name, check in columns.items()
        },
    }
    return {
        "type": "object",
        "required": ["schema", "rows"],
        "properties": {
            "schema": {"type": "integer", "enum": [SCHEMA]},
            "rows": {"type": "array", "maxItems": MAX_ROWS, "items": row},
        },
    }


def _schema_of(table: str, column: str) -> Mapping[str, Any] | None:
    bound = BOUNDS.get(table, {}).get(column)
    return None if bound is None else bound.schema


def runs_of(rows: list[Row]) -> set[str]:
    """Return the runs of rows; rows of a host may have none."""
    return {row["run_id"] for row in rows if row.get("run_id")}


def _checked_row(table: str, row: object, place: int) -> Row:
    known = (ROW_TABLES | QUESTIONS)[table]
    if not isinstance(row, dict):
        raise WireError(422, f"row {place} is not an object")
    missing = known.identity.keys() - row.keys()
    if missing:
        raise WireError(422, f"row {place} has no {', '.join(sorted(missing))}")
    kept: Row = {}
    checks: Mapping[str, Check] = known.identity | known.others
    for name, value in row.items():
        check = checks.get(name)
        if check is None:
            continue  # a column of a newer sender
        try:
            kept[name] = check.take(value)
        except ValueError as error:
            raise WireError(422, f"row {place}, {name}: {error}") from error
    for name, problem in find_problems(table, kept).items():
        raise WireError(422, f"row {place}, {name}: {problem}")
    if table not in HOST_TABLES or kept.get("run_id"):
        try:
            check_run_name(kept["run_id"])
        except RunNameError as error:
            raise WireError(422, f"row {place}: {error}") from error
    return kept


def _document(body: bytes) -> dict[str, Any]:
    """Return a JSON object. Reject what parsers disagree on, such as NaN and repeated keys."""
    try:
        found = json.loads(
            body.decode("utf-8"),
            parse_constant=_reject_constant,
            object_pairs_hook=_object_without_repeats,
        )
    except (ValueError, RecursionError) as error:
        raise WireError(400, f"the body is not JSON: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise WireError(422, "the body is not a JSON object")
    return found


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found

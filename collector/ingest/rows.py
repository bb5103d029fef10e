"""What a description may be: each table's columns, their types and their bounds.

A row is taken whole or the whole request is refused: descriptions are few, and who sends them
can be told which one is wrong.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import RunNameError, WireError
from ..identity import RUN_NAME, check_run_name
from ..names import storable_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..identity import Row

MAX_MEMBERS = 65_536
MAX_ENTRIES = 512
MAX_TEXT_LETTERS = 4 << 20
"""A manifest lists the hosts of the whole job, and an event may hold a stack of each thread."""


@dataclass(frozen=True, slots=True)
class Check:
    """A type of value."""

    take: Callable[[Any], Any]
    """Returns the value as it is stored; raises `ValueError` where it is of another type."""

    schema: dict[str, Any]
    """The same in JSON Schema."""


def integer(bits: int, *, signed: bool = True) -> Check:
    """Return the check for an integer of so many bits; 2.0 is one, as in JSON Schema."""
    low = -(1 << (bits - 1)) if signed else 0
    high = (1 << (bits - 1 if signed else bits)) - 1

    def take(value: Any) -> int:  # noqa: ANN401  # whatever JSON holds
        is_whole = type(value) is int or (type(value) is float and value.is_integer())
        if not is_whole or not low <= value <= high:
            raise ValueError(f"expected an integer from {low} to {high}")
        return int(value)

    # FastAPI writes bounds as floats, which hold a power of two and not the number before it.
    return Check(take, {"type": "integer", "minimum": low, "exclusiveMaximum": high + 1})


def optional(check: Check) -> Check:
    """Return the check for such a value or null."""
    return Check(
        lambda value: None if value is None else check.take(value),
        {"anyOf": [check.schema, {"type": "null"}]},
    )


def mapping(check: Check) -> Check:
    """Return the check for an object whose values are such ones."""

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
    """Return a name, safe to store; the same as the tail writes."""
    if not isinstance(value, str):
        raise ValueError("expected a text")  # noqa: TRY004  # one kind of error for all checks
    return storable_name(value)


def _text(value: Any) -> str:  # noqa: ANN401  # as above
    """Return a text that may hold line breaks (a traceback, a document)."""
    if not isinstance(value, str) or len(value) > MAX_TEXT_LETTERS:
        raise ValueError(f"expected a text of at most {MAX_TEXT_LETTERS} letters")
    kept = "".join(letter if letter in "\n\t" or letter.isprintable() else "�" for letter in value)
    return kept.encode("utf-8", "replace").decode()


def _members(value: Any) -> list[int]:  # noqa: ANN401  # as above
    if not isinstance(value, list) or len(value) > MAX_MEMBERS:
        raise ValueError(f"expected a list of at most {MAX_MEMBERS} ranks")
    return [INT32.take(member) for member in value]


INT32, INT64, UINT64 = integer(32), integer(64), integer(64, signed=False)
OPT_INT64 = optional(INT64)
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
    """One table that may be written by descriptions."""

    identity: dict[str, Check]
    """Columns that must be there."""

    others: dict[str, Check]
    """Columns that may be left out, and take the table's default then."""


ROW_TABLES: dict[str, RowTable] = {
    "runs": RowTable(
        identity={"run_id": RUN, "epoch": INT32, "revision": UINT64},
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
            "revision": UINT64,
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
"""What `POST /v1/rows/TABLE` takes. Rows of `clock` and `samples` may be of no run: they are of a
host, whatever runs there."""

OF_A_HOST = frozenset({"clock", "samples"})


def parsed_rows(table: str, body: bytes) -> list[Row]:
    """Return the rows of a request, each column checked.

    Raises:
        WireError: 400 where it is no JSON, 404 where no such table takes rows, 413 where there
            are too many rows, 422 where one is not of its form.
    """
    known = ROW_TABLES.get(table)
    if known is None:
        raise WireError(
            404, f"no table takes rows under that name; these do: {', '.join(ROW_TABLES)}"
        )
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
    return [_row(known, row, place, of_a_host=table in OF_A_HOST) for place, row in enumerate(rows)]


def request_schema(table: str) -> dict[str, Any]:
    """Return the JSON Schema of a request that brings rows of ``table``.

    Columns that it does not name may come, and are left out.
    """
    known = ROW_TABLES[table]
    columns = known.identity | known.others
    row = {
        "type": "object",
        "required": list(known.identity),
        "properties": {name: check.schema for name, check in columns.items()},
    }
    return {
        "type": "object",
        "required": ["schema", "rows"],
        "properties": {
            "schema": {"type": "integer", "enum": [SCHEMA]},
            "rows": {"type": "array", "maxItems": MAX_ROWS, "items": row},
        },
    }


def runs_of(rows: list[Row]) -> set[str]:
    """Return the runs that rows speak of; a host's rows speak of none."""
    return {row["run_id"] for row in rows if row.get("run_id")}


def _row(known: RowTable, row: object, place: int, *, of_a_host: bool) -> Row:
    if not isinstance(row, dict):
        raise WireError(422, f"row {place} is no object")
    missing = known.identity.keys() - row.keys()
    if missing:
        raise WireError(422, f"row {place} lacks {', '.join(sorted(missing))}")
    kept: Row = {}
    checks: Mapping[str, Check] = known.identity | known.others
    for name, value in row.items():
        check = checks.get(name)
        if check is None:
            continue  # a newer sender's: it has no place here
        try:
            kept[name] = check.take(value)
        except ValueError as error:
            raise WireError(422, f"row {place}, {name}: {error}") from error
    if not of_a_host or kept.get("run_id"):
        try:
            check_run_name(kept["run_id"])
        except RunNameError as error:
            raise WireError(422, f"row {place}: {error}") from error
    return kept


def _document(body: bytes) -> dict[str, Any]:
    """Return a JSON object; what only some parsers understand, or only with pain, is refused."""
    try:
        found = json.loads(
            body.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_once
        )
    except (ValueError, RecursionError) as error:
        raise WireError(400, f"the body is no JSON: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise WireError(422, "the body is no JSON object")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object names a key twice")
    return found

"""What a description may be: each table's columns, their types and their bounds.

A row is taken whole or the whole request is refused: descriptions are few, and who sends them
can be told which one is wrong.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import RunNameError, WireError
from ..identity import checked_run_name
from .value_checks import (
    FLOAT,
    INT32,
    INT64,
    MEMBERS,
    OPT_FLOAT,
    OPT_INT64,
    RUN,
    RUN_OR_NONE,
    TEXT,
    UINT64,
    WORD,
    mapping,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..identity import Row
    from .value_checks import Check

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
            checked_run_name(kept["run_id"])
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

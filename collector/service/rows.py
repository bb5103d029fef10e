"""What a description may be: each table's columns, their types and their bounds.

A row is taken whole or the whole request is refused: descriptions are few, and who sends them
can be told which one is wrong.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from collector.errors import RunNameError, WireError
from collector.identity import checked_run_name
from collector.names import storable_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from collector.store import Row

MAX_ROWS = 10_000
MAX_MEMBERS = 65_536
MAX_ENTRIES = 512
MAX_WORD_BYTES = 256
MAX_TEXT_LETTERS = 4 << 20
"""A manifest lists the hosts of the whole job, and an event may hold a stack of each thread."""

SCHEMA = 1


def _int(bits: int, *, signed: bool = True) -> Callable[[Any], int]:
    low = -(1 << (bits - 1)) if signed else 0
    high = (1 << (bits - 1 if signed else bits)) - 1

    def check(value: Any) -> int:  # noqa: ANN401  # whatever JSON holds
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"expected an integer from {low} to {high}")
        return int(value)

    return check


def _float(value: Any) -> float:  # noqa: ANN401  # as above
    if type(value) not in {int, float} or not math.isfinite(value):
        raise ValueError("expected a finite number")
    return float(value)


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


def _mapping(value: Any, check: Callable[[Any], Any]) -> dict[str, Any]:  # noqa: ANN401  # as above
    if not isinstance(value, dict) or len(value) > MAX_ENTRIES:
        raise ValueError(f"expected an object of at most {MAX_ENTRIES} entries")
    return {_word(name): check(inner) for name, inner in value.items()}


def _members(value: Any) -> list[int]:  # noqa: ANN401  # as above
    if not isinstance(value, list) or len(value) > MAX_MEMBERS:
        raise ValueError(f"expected a list of at most {MAX_MEMBERS} ranks")
    check = _int(32)
    return [check(member) for member in value]


def _optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


INT32, INT64 = _int(32), _int(64)
UINT64 = _int(64, signed=False)
OPT_INT64, OPT_FLOAT = _optional(INT64), _optional(_float)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """One table that may be written by descriptions."""

    identity: dict[str, Callable[[Any], Any]]
    """Columns that must be there."""

    others: dict[str, Callable[[Any], Any]]
    """Columns that may be left out, and take the table's default then."""


def _texts(value: Any) -> dict[str, Any]:  # noqa: ANN401  # as above
    return _mapping(value, _text)


ROW_TABLES: dict[str, RowTable] = {
    "runs": RowTable(
        identity={"run_id": _word, "epoch": INT32, "revision": UINT64},
        others={
            "created_ns": INT64,
            "started_ns": OPT_INT64,
            "ended_ns": OPT_INT64,
            "state": _word,
            "source_format": _word,
            "world_size": INT32,
            "layout": lambda value: _mapping(value, INT32),
            "model": _text,
            "flops_per_token": OPT_FLOAT,
            "flops_convention": _word,
            "paced": _text,
            "manifest": _text,
        },
    ),
    "ranks": RowTable(
        identity={
            "run_id": _word,
            "epoch": INT32,
            "rank": INT32,
            "process": _word,
            "revision": UINT64,
        },
        others={
            "host": _word,
            "boot_id": _word,
            "local_rank": INT32,
            "pod": _word,
            "device_uuid": _word,
            "device_name": _word,
            "dtype": _word,
            "peak_flops_per_s": OPT_FLOAT,
            **dict.fromkeys(("dp", "tp", "pp", "cp", "ep"), INT32),
            "switch": _word,
            "rack": _word,
            "rail": _word,
            "pid": INT64,
            "manifest_hash": _word,
            "started_ns": OPT_INT64,
            "exit_state": _word,
            "exit_ns": OPT_INT64,
            "dropped": lambda value: _mapping(value, UINT64),
        },
    ),
    "groups": RowTable(
        identity={"run_id": _word, "epoch": INT32, "group_id": UINT64},
        others={"kind": _word, "name": _word, "members": _members},
    ),
    "events": RowTable(
        identity={"run_id": _word, "epoch": INT32, "rank": INT32, "at_ns": INT64, "kind": _word},
        others={"text": _text, "data": _text, "process": _word, "line": INT64},
    ),
    "manifests": RowTable(
        identity={"run_id": _word, "manifest_hash": _word}, others={"settings": _texts}
    ),
    "clock": RowTable(
        identity={"host": _word, "boot_id": _word, "at_ns": INT64, "offset_ns": INT64},
        others={"drift_ppb": INT64, "clock_error_ns": INT64},
    ),
    "samples": RowTable(
        identity={"host": _word, "device": INT32, "at_ns": INT64, "name": _word, "value": _float},
        others={"run_id": _word},
    ),
    "heartbeats": RowTable(
        identity={
            "run_id": _word,
            "epoch": INT32,
            "rank": INT32,
            "host": _word,
            "at_ns": INT64,
            "state": _word,
        },
        others={
            "pid": INT64,
            **dict.fromkeys(("address", "pod", "hardware"), _word),
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
    checks: Mapping[str, Callable[[Any], Any]] = known.identity | known.others
    for name, value in row.items():
        check = checks.get(name)
        if check is None:
            continue  # a newer sender's: it has no place here
        try:
            kept[name] = check(value)
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

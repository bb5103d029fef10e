"""Descriptions: the tables that `POST /v1/rows/TABLE` takes, their columns, types and bounds.

If a row is invalid, the whole request is rejected, with the row's number: descriptions are few, and
their sender can correct them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, Required

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from typing_extensions import TypedDict

from ..bounds import BOUNDS
from ..errors import RunNameError, WireError
from ..identity import MAX_INT32, MAX_INT64, RUN_NAME, check_run_name
from ..names import storable_name

if TYPE_CHECKING:
    from ..bounds import Bound
    from ..identity import Row

MAX_ROWS = 10_000
MAX_MEMBERS = 65_536
MAX_ENTRIES = 512
MAX_TEXT_LETTERS = 4 << 20
"""A manifest lists the hosts of the whole job, and an event may hold the stacks of all threads."""

SCHEMA = 1


def _whole(value: object) -> object:
    """Return a float without a fraction as an integer, which it is in JSON Schema."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _word(value: object) -> object:
    """Return a name that is safe to store, as the tail writes it."""
    return storable_name(value) if isinstance(value, str) else value


def _text(value: object) -> object:
    """Return a text that may have line breaks, such as a traceback or a document."""
    if not isinstance(value, str):
        return value
    kept = "".join(letter if letter in "\n\t" or letter.isprintable() else "�" for letter in value)
    return kept.encode("utf-8", "replace").decode()


def _run_name(value: str) -> str:
    try:
        return check_run_name(value)
    except RunNameError as error:
        raise ValueError(str(error)) from error


def _within(bound: Bound, value: Any) -> Any:  # noqa: ANN401  # of any column
    if problem := bound.find_problem(value):
        raise ValueError(problem)
    return value


# A bound in JSON is a float, which can hold a power of two but not the number before it.
INT32 = Annotated[int, Field(ge=-MAX_INT32 - 1, lt=MAX_INT32 + 1), BeforeValidator(_whole)]
INT64 = Annotated[int, Field(ge=-MAX_INT64 - 1, lt=MAX_INT64 + 1), BeforeValidator(_whole)]
UINT64 = Annotated[int, Field(ge=0, lt=1 << 64), BeforeValidator(_whole)]
REVISION = Annotated[int, Field(ge=0, lt=MAX_INT64 + 1), BeforeValidator(_whole)]
"""Unix time in ns, by which the newest row of one identity is found."""

FLOAT = Annotated[float, Field(allow_inf_nan=False)]
WORD = Annotated[str, BeforeValidator(_word)]
TEXT = Annotated[str, Field(max_length=MAX_TEXT_LETTERS), BeforeValidator(_text)]
RUN = Annotated[
    WORD,
    AfterValidator(_run_name),
    WithJsonSchema({"type": "string", "pattern": f"^{RUN_NAME.pattern}$"}),
]
RUN_OR_NONE = Annotated[
    WORD,
    AfterValidator(lambda name: name and _run_name(name)),
    WithJsonSchema({"type": "string", "pattern": f"^({RUN_NAME.pattern})?$"}),
]
MEMBERS = Annotated[list[INT32], Field(max_length=MAX_MEMBERS)]
LAYOUT = Annotated[dict[WORD, INT32], Field(max_length=MAX_ENTRIES)]
COUNTS = Annotated[dict[WORD, UINT64], Field(max_length=MAX_ENTRIES)]
SETTINGS = Annotated[dict[WORD, TEXT], Field(max_length=MAX_ENTRIES)]
OPT_INT32, OPT_INT64 = INT32 | None, INT64 | None
OPT_UINT64, OPT_FLOAT = UINT64 | None, FLOAT | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """Types of the columns of a table that takes descriptions."""

    identity: dict[str, Any]
    """Required columns."""

    others: dict[str, Any]
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
            "layout": LAYOUT,
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
            "memory": TEXT,
            **dict.fromkeys(("dp", "tp", "pp", "cp", "ep"), INT32),
            "switch": WORD,
            "rack": WORD,
            "rail": WORD,
            "pid": INT64,
            "manifest_hash": WORD,
            "started_ns": OPT_INT64,
            "exit_state": WORD,
            "exit_ns": OPT_INT64,
            "dropped": COUNTS,
            "produced": OPT_UINT64,
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
    "kernels": RowTable(
        identity={
            "run_id": RUN,
            "epoch": INT32,
            "rank": INT32,
            "step": INT32,
            **dict.fromkeys(("phase", "stream", "name"), WORD),
            **dict.fromkeys(("num", "total_ns", "max_ns"), INT64),
        },
        others={
            "num_names": INT64,
            "dtype": WORD,
            **dict.fromkeys(("flops", "num_bytes"), OPT_INT64),
        },
    ),
    "manifests": RowTable(
        identity={"run_id": RUN, "manifest_hash": WORD}, others={"settings": SETTINGS}
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
    "host_checks": RowTable(
        identity={
            "host": WORD,
            "at_ns": INT64,
            **dict.fromkeys(("name", "state", "occasion"), WORD),
        },
        others={
            "run_id": RUN_OR_NONE,
            "epoch": INT32,
            **dict.fromkeys(("section", "part", "device"), WORD),
            **dict.fromkeys(("reason", "remedy", "value"), TEXT),
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
            "first_step": OPT_INT32,
            "has_ended": bool,
        },
    ),
}
"""Rows that are not stored: the answer says under which run and epoch each process is."""


@cache
def _row_type(table: str) -> Any:  # noqa: ANN401  # a TypedDict
    """Return the type of a row of a table, with the bounds of its columns."""
    columns = (ROW_TABLES | QUESTIONS)[table]
    named: dict[str, Any] = {}
    for name, column in (columns.identity | columns.others).items():
        bound = BOUNDS.get(table, {}).get(name)
        bounded = column
        if bound is not None:
            schema = () if bound.schema is None else (WithJsonSchema(dict(bound.schema)),)
            bounded = Annotated[column, AfterValidator(partial(_within, bound)), *schema]
        named[name] = Required[bounded] if name in columns.identity else NotRequired[bounded]
    typed_dict: Any = TypedDict
    return typed_dict(table, named)


@cache
def _rows_adapter(table: str) -> TypeAdapter[Any]:
    rows: Any = list
    return TypeAdapter(rows[_row_type(table)])


def parse_rows(table: str, body: bytes) -> list[Row]:
    """Return the rows of a request, each column checked. Unknown columns are ignored.

    Raises:
        WireError: 400 if the body is not JSON, 404 if the table takes no rows, 413 if there are
            too many rows, 422 if a row is invalid.
    """
    if table not in ROW_TABLES | QUESTIONS:
        raise WireError(404, f"this table takes no rows; these do: {', '.join(ROW_TABLES)}")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(400, f"the body is not JSON: {str(error)[:200]}") from error
    rows = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or document.get("schema") != SCHEMA:
        raise WireError(
            422,
            f'expected {{"schema": {SCHEMA}, "rows": [...]}}; this collector reads schema'
            f" {SCHEMA} to {SCHEMA}",
            supported=(SCHEMA, SCHEMA),
        )
    if len(rows) > MAX_ROWS:
        raise WireError(413, f"{len(rows)} rows are more than {MAX_ROWS}: send fewer at once")
    try:
        valid: list[Row] = _rows_adapter(table).validate_python(rows, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ", ".join(map(str, first["loc"][:2]))  # row and column
        reason = first["msg"].removeprefix("Value error, ")
        raise WireError(422, f"row {place}: {reason}") from error
    return valid


def request_schema(table: str) -> dict[str, Any]:
    """Return the JSON Schema of a request with rows of ``table``; unknown columns are ignored."""
    return {
        "type": "object",
        "required": ["schema", "rows"],
        "properties": {
            "schema": {"type": "integer", "enum": [SCHEMA]},
            "rows": {
                "type": "array",
                "maxItems": MAX_ROWS,
                "items": TypeAdapter(_row_type(table)).json_schema(),
            },
        },
    }


def runs_of(rows: list[Row]) -> set[str]:
    """Return the runs of rows; rows of a host may have none."""
    return {row["run_id"] for row in rows if row.get("run_id")}

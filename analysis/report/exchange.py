"""Reports as JSON that reads back to an equal report, for another process of the same version."""

from __future__ import annotations

import base64
import json
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from hashlib import sha256
from typing import Any

import numpy as np

from rankscope.tracer.topology import Coords, Layout

from ..trace.account import RecordAccount
from . import network
from . import report as report_module
from .report import RunReport

OTHERS = (Coords, Layout, RecordAccount)
RECORDS: dict[str, type[Any]] = {
    each.__name__: each
    for each in (*vars(report_module).values(), *vars(network).values(), *OTHERS)
    if isinstance(each, type) and (is_dataclass(each) or issubclass(each, StrEnum))
}
"""All that a report is made of, by name. Nothing else can be read."""

FORM = sha256(
    repr(
        [
            (name, [(each.name, str(each.type)) for each in fields(one)])
            for name, one in RECORDS.items()
            if is_dataclass(one)
        ]
    ).encode()
).hexdigest()[:12]
"""A digest of the names and types of a report's fields: a stored report of another form may read
with defaults in place of what it lacks."""

DTYPES = ("int64", "float64")
PLAIN = frozenset({bool, float, int, str, type(None)})


def write_report(report: RunReport) -> str:
    """Return a report as text."""
    return json.dumps(_encode(report))


def read_report(text: str) -> RunReport:
    """Return the report that `write_report` wrote.

    Raises:
        ValueError: The text has another form, or is of another version.
    """
    try:
        found = _decode(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a report of this version: {error!r}") from error
    if not isinstance(found, RunReport):
        raise ValueError(  # noqa: TRY004  # the text is wrong, as above
            f"not a report, but of type {type(found).__name__}"
        )
    return found


def _encode(value: Any) -> Any:  # noqa: ANN401  # any part of a report
    """Return JSON types; what JSON lacks is a list of its type's name and its contents."""
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in PLAIN:
        return value
    if isinstance(value, StrEnum):
        return [type(value).__name__, value.value]
    if isinstance(value, tuple):
        return ["tuple", *map(_encode, value)]
    if isinstance(value, np.ndarray):
        data = base64.b64encode(np.ascontiguousarray(value).data).decode()
        return ["array", value.dtype.name, list(value.shape), data]
    if is_dataclass(value) and not isinstance(value, type):
        held = {name: _encode(getattr(value, name)) for name in _field_names(type(value))}
        return [type(value).__name__, held]
    return ["dict", *([_encode(key), _encode(each)] for key, each in value.items())]


@cache
def _field_names(record: type[Any]) -> tuple[str, ...]:
    return tuple(each.name for each in fields(record))


def _decode(value: Any) -> Any:  # noqa: ANN401  # as above
    if not isinstance(value, list):
        return value
    name, *contents = value
    if name == "tuple":
        return tuple(map(_decode, contents))
    if name == "dict":
        return {_decode(key): _decode(each) for key, each in contents}
    if name == "array":
        dtype, shape, data = contents
        if dtype not in DTYPES:
            raise ValueError(f"found an array of {dtype}, expected {' or '.join(DTYPES)}")
        return np.frombuffer(base64.b64decode(data), dtype).reshape(shape)
    (held,) = contents
    if isinstance(held, dict):
        held = {field: _decode(each) for field, each in held.items()}
        return RECORDS[name](**held)
    return RECORDS[name](held)

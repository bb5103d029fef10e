"""Reports as JSON that reads back to an equal report, for another process of the same version."""

from __future__ import annotations

import base64
import gc
import json
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from hashlib import sha256
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.topology import Coords, Layout

from ..trace.account import RecordAccount
from . import network
from . import report as report_module
from .report import RunReport

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from numpy.typing import NDArray

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
    was_enabled = gc.isenabled()
    gc.disable()  # a hundred thousand records without a cycle: collections took half of the time
    try:
        found = _decode(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a report of this version: {error!r}") from error
    finally:
        if was_enabled:
            gc.enable()
    if not isinstance(found, RunReport):
        raise ValueError(  # noqa: TRY004  # the text is wrong, as above
            f"not a report, but of type {type(found).__name__}"
        )
    return found


def _encode(value: Any) -> Any:  # noqa: ANN401  # any part of a report
    """Return JSON types; what JSON lacks is a list of its type's name and its contents."""
    kind: Any = type(value)
    return value if kind in PLAIN else _encoder(kind)(value)


@cache
def _encoder(kind: type[Any]) -> Callable[[Any], Any]:
    """Return the encoder of a type that is not plain; a report has half a million values."""
    if issubclass(kind, np.generic):
        return lambda value: value.item()
    if issubclass(kind, StrEnum):
        return lambda value: [kind.__name__, value.value]
    if issubclass(kind, tuple):
        return _encode_tuple
    if issubclass(kind, np.ndarray):
        return _encode_array
    if is_dataclass(kind):
        names = tuple(each.name for each in fields(kind))
        return lambda value: [
            kind.__name__,
            dict(zip(names, _encode_all([getattr(value, name) for name in names]), strict=True)),
        ]
    return lambda value: [
        "dict",
        *zip(_encode_all(value), _encode_all(value.values()), strict=True),
    ]


def _encode_tuple(value: tuple[Any, ...]) -> list[Any]:
    """Encode a tuple; one of equal records as its columns, which takes a third of the time."""
    kinds = set(map(type, value))
    record: Any = kinds.pop() if len(kinds) == 1 else None
    names = [each.name for each in fields(record)] if is_dataclass(record) else []
    if len(names) < 2:  # noqa: PLR2004  # `attrgetter` returns a tuple for several names only
        return ["tuple", *_encode_all(value)]
    columns = zip(*map(attrgetter(*names), value), strict=True)
    return ["rows", record.__name__, *([*_encode_all(column)] for column in columns)]


def _encode_all(values: Collection[Any]) -> Iterable[Any]:
    return values if PLAIN.issuperset(map(type, values)) else map(_encode, values)


def _encode_array(value: NDArray[Any]) -> list[Any]:
    data = base64.b64encode(np.ascontiguousarray(value).data).decode()
    return ["array", value.dtype.name, list(value.shape), data]


def _decode(value: Any) -> Any:  # noqa: ANN401  # as above
    return _decode_list(value) if type(value) is list else value


def _decode_list(value: list[Any]) -> Any:  # noqa: ANN401  # as above
    """Decode what is not plain. Most values are, and a call for each took half of the time."""
    name, *contents = value
    if name == "rows":
        return tuple(_decode_rows(*contents))
    if name == "tuple":
        return tuple(map(_decode, contents)) if list in map(type, contents) else tuple(contents)
    if name == "dict":
        return {
            _decode(key): _decode_list(each) if type(each) is list else each
            for key, each in contents
        }
    if name == "array":
        dtype, shape, data = contents
        if dtype not in DTYPES:
            raise ValueError(f"found an array of {dtype}, expected {' or '.join(DTYPES)}")
        return np.frombuffer(base64.b64decode(data), dtype).reshape(shape)
    (held,) = contents
    if isinstance(held, dict):
        held = {
            field: _decode_list(each) if type(each) is list else each
            for field, each in held.items()
        }
        return RECORDS[name](**held)
    return RECORDS[name](held)


def _decode_rows(name: str, *columns: list[Any]) -> Iterable[Any]:
    record = RECORDS[name]
    names = [each.name for each in fields(record)]
    rows = zip(*(map(_decode, column) for column in columns), strict=True)
    return (record(**dict(zip(names, row, strict=True))) for row in rows)

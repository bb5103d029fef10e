"""Tables of a run read piece by piece, put together again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.sorting import sort_rows
from .context import MicrobatchTable, SampleTable
from .tables import SpanTable, StepTable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


def join_spans(first: SpanTable, second: SpanTable) -> SpanTable:
    """Return the rows of ``first``, then those of ``second``, under one list of names and tracks.

    The order is the caller's business: all of ``second`` must come after ``first``.
    """
    names, name_codes = _joint_texts(first.names, second.names)
    tracks, track_codes = _joint_texts(first.tracks, second.tracks)
    renamed = {
        "name": _recoded(second.name, name_codes),
        "track": _recoded(second.track, track_codes),
    }
    return SpanTable(**_columns(first, second, renamed), names=names, tracks=tracks)


def join_steps(first: StepTable, second: StepTable) -> StepTable:
    """Return the rows of ``first``, then those of ``second``."""
    return StepTable(**_columns(first, second, {}))


def join_microbatches(first: MicrobatchTable, second: MicrobatchTable) -> MicrobatchTable:
    """Return the rows of ``first``, then those of ``second``."""
    return MicrobatchTable(**_columns(first, second, {}))


def join_samples(first: SampleTable, second: SampleTable) -> SampleTable:
    """Return the rows of both, ordered by (name, host, device, at_ns) as one list numbers them."""
    hosts, host_codes = _joint_texts(first.hosts, second.hosts)
    names, name_codes = _joint_texts(first.names, second.names)
    renamed = {"host": _recoded(second.host, host_codes), "name": _recoded(second.name, name_codes)}
    columns = _columns(first, second, renamed)
    order = sort_rows(columns["name"], columns["host"], columns["device"], columns["at_ns"])
    ordered = {name: column[order] for name, column in columns.items()}
    return SampleTable(**ordered, hosts=hosts, names=names)


def rows_of_microbatches(table: MicrobatchTable, keep: NDArray[np.bool_]) -> MicrobatchTable:
    """Return the rows of ``table`` that ``keep``, shape (rows,), says."""
    fields = MicrobatchTable.__dataclass_fields__
    return MicrobatchTable(**{name: getattr(table, name)[keep] for name in fields})


def rows_of_samples(table: SampleTable, keep: NDArray[np.bool_]) -> SampleTable:
    """Return the rows of ``table`` that ``keep``, shape (rows,), says."""
    fields = SampleTable.__dataclass_fields__.keys() - {"hosts", "names"}
    kept = {name: getattr(table, name)[keep] for name in fields}
    return SampleTable(**kept, hosts=table.hosts, names=table.names)


def _columns(
    first: object, second: object, renamed: Mapping[str, NDArray[np.int32]]
) -> dict[str, NDArray[Any]]:
    """Return each column of both; those in ``renamed`` stand for the second's."""
    fields = type(first).__dataclass_fields__  # type: ignore[attr-defined]
    return {
        name: np.concatenate((getattr(first, name), renamed.get(name, getattr(second, name))))
        for name in fields
        if name not in ("names", "tracks", "hosts")
    }


def _joint_texts(
    first: tuple[str, ...], second: tuple[str, ...]
) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Return one list of both texts, and the place in it of each of the second's."""
    places = {text: place for place, text in enumerate(first)}
    codes = [places.setdefault(text, len(places)) for text in second]
    return tuple(places), np.array([*codes, 0], dtype=np.int32)


def _recoded(column: NDArray[np.int32], codes: NDArray[np.int32]) -> NDArray[np.int32]:
    recoded: NDArray[np.int32] = codes[column]
    return recoded

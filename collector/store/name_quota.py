"""At most so many names a run: a job that names each span anew must not grow the store's index."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from ..arrow_columns import coded_strings, to_codes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .store import Store

MAX_NAMES = 10_000
OTHER_NAME = "__other__"
"""What stands for the name of a span that came after the run had all it may have."""

MAX_RUNS = 1_000
"""Runs whose names are remembered; a run that comes back is read from the store again."""

SELECT_NAMES = """
SELECT DISTINCT name FROM spans WHERE run_id = {run_id:String} LIMIT {most:UInt32}
"""


class NameCap:
    """The names of each run that came lately, and how many spans lost theirs.

    The cap is of one collector: several of one store take in `MAX_NAMES` each at most, until
    they are started again.

    Args:
        store: An open store; it tells the names of runs that began before this process.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._names: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def capped(self, spans: pa.Table) -> pa.Table:
        """Return the spans with names beyond their run's cap replaced by `OTHER_NAME`.

        Args:
            spans: Columns ``run_id`` and ``name`` are dictionaries.

        Raises:
            StoreError: The names of a run could not be read.
        """
        if self._is_known(spans):
            return spans
        run_codes, runs = to_codes(spans["run_id"])
        name_codes, names = to_codes(spans["name"])
        with self._lock:
            beyond = {
                place: codes
                for place, run_id in enumerate(runs)
                if len(codes := self._take(run_id, name_codes[run_codes == place], names))
            }
        if not beyond:
            return spans
        is_other = np.zeros(len(name_codes), dtype=bool)
        for place, codes in beyond.items():
            is_other |= (run_codes == place) & np.isin(name_codes, codes)
        texts = (*names, OTHER_NAME)
        column = coded_strings(np.where(is_other, len(names), name_codes), texts)
        return spans.set_column(spans.schema.get_field_index("name"), "name", _used(column))

    def _is_known(self, spans: pa.Table) -> bool:
        """Return whether the spans are of one run, which has all their names: the usual case."""
        runs, names = _texts(spans["run_id"]), _texts(spans["name"])
        if runs is None or names is None or len(runs) != 1:
            return False
        with self._lock:
            return self._known(runs[0]).issuperset(names)

    def _take(self, run_id: str, codes: NDArray[np.int32], names: tuple[str, ...]) -> Any:  # noqa: ANN401
        """Add a run's names as far as it may have them; return the codes of the others."""
        used = np.flatnonzero(np.bincount(codes, minlength=len(names)))
        known = self._known(run_id)
        beyond = []
        for code in used.tolist():
            if names[code] in known:
                continue
            if len(known) < MAX_NAMES:
                known.add(names[code])
            else:
                beyond.append(code)
        return np.array(beyond, dtype=np.int32)

    def _known(self, run_id: str) -> set[str]:
        known = self._names.get(run_id)
        if known is None:
            rows = self._store.rows(SELECT_NAMES, {"run_id": run_id, "most": MAX_NAMES + 1})
            known = {row["name"] for row in rows} - {OTHER_NAME}
            while len(self._names) >= MAX_RUNS:
                del self._names[next(iter(self._names))]
            self._names[run_id] = known
        return known


def _texts(column: pa.ChunkedArray[Any]) -> list[str] | None:
    """Return the dictionary that all chunks share; None where there are several."""
    chunks = cast("list[pa.DictionaryArray[Any, Any]]", column.chunks)
    if not chunks or any(len(part.dictionary) != len(chunks[0].dictionary) for part in chunks):
        return None
    if len(chunks) > 1 and not all(
        part.dictionary.equals(chunks[0].dictionary) for part in chunks[1:]
    ):
        return None
    return cast("list[str]", chunks[0].dictionary.to_pylist())


def _used(column: Any) -> Any:  # noqa: ANN401  # an Arrow column
    """Return the column with a dictionary of the texts that it uses alone."""
    codes, texts = to_codes(pa.chunked_array([column]))
    return coded_strings(codes, texts)

"""Quota of span names per run: a job that gives each span a new name must not bloat the index."""

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
"""Replaces the name of a span that came after its run had used up its quota."""

MAX_RUNS = 1_000
"""Runs whose names are cached; the names of any other run are read from the store again."""

SELECT_NAMES = """
SELECT DISTINCT name FROM spans WHERE run_id = {run_id:String} LIMIT {most:UInt32}
"""


class NameQuota:
    """The names of recent runs, at most `MAX_NAMES` each. Threads may share it.

    The quota is per collector: each collector of a store takes up to `MAX_NAMES` names, until it
    is restarted.

    Args:
        store: An open store; it has the names of runs that began before this process.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._names: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def limit(self, spans: pa.Table) -> pa.Table:
        """Return the spans with names beyond their run's quota replaced by `OTHER_NAME`.

        Args:
            spans: Columns ``run_id`` and ``name`` are dictionaries.

        Raises:
            StoreError: The names of a run could not be read.
        """
        if self._has_all_names(spans):
            return spans
        run_codes, runs = to_codes(spans["run_id"])
        name_codes, names = to_codes(spans["name"])
        with self._lock:
            beyond = {
                run_code: codes
                for run_code, run_id in enumerate(runs)
                if len(codes := self._add(run_id, name_codes[run_codes == run_code], names))
            }
        if not beyond:
            return spans
        is_other = np.zeros(len(name_codes), dtype=bool)
        for run_code, codes in beyond.items():
            is_other |= (run_codes == run_code) & np.isin(name_codes, codes)
        column = coded_strings(np.where(is_other, len(names), name_codes), (*names, OTHER_NAME))
        column_index = spans.schema.get_field_index("name")
        codes, texts = to_codes(pa.chunked_array([column]))
        return spans.set_column(
            column_index, "name", coded_strings(codes, texts)
        )  # only texts in use

    def _has_all_names(self, spans: pa.Table) -> bool:
        """Return whether the spans are of one run that has all their names: the usual case."""
        runs, names = _shared_dictionary(spans["run_id"]), _shared_dictionary(spans["name"])
        if runs is None or names is None or len(runs) != 1:
            return False
        with self._lock:
            return self._run_names(runs[0]).issuperset(names)

    def _add(self, run_id: str, codes: NDArray[np.int32], names: tuple[str, ...]) -> Any:  # noqa: ANN401
        """Add names to a run up to its quota; return the codes of the others."""
        used = np.flatnonzero(np.bincount(codes, minlength=len(names)))
        kept = self._run_names(run_id)
        beyond = []
        for code in used.tolist():
            if names[code] in kept:
                continue
            if len(kept) < MAX_NAMES:
                kept.add(names[code])
            else:
                beyond.append(code)
        return np.array(beyond, dtype=np.int32)

    def _run_names(self, run_id: str) -> set[str]:
        kept = self._names.get(run_id)
        if kept is None:
            rows = self._store.rows(SELECT_NAMES, {"run_id": run_id, "most": MAX_NAMES + 1})
            kept = {row["name"] for row in rows} - {OTHER_NAME}
            while len(self._names) >= MAX_RUNS:
                del self._names[next(iter(self._names))]
            self._names[run_id] = kept
        return kept


def _shared_dictionary(column: pa.ChunkedArray[Any]) -> list[str] | None:
    """Return the dictionary of a column; None if its chunks have different ones."""
    chunks = cast("list[pa.DictionaryArray[Any, Any]]", column.chunks)
    if not chunks or any(len(part.dictionary) != len(chunks[0].dictionary) for part in chunks):
        return None
    if len(chunks) > 1 and not all(
        part.dictionary.equals(chunks[0].dictionary) for part in chunks[1:]
    ):
        return None
    return cast("list[str]", chunks[0].dictionary.to_pylist())

"""Keep the times that rows were stored with when they are stored again.

A row that is sent again after a collector's death may be there already. Where its sender has
another notion of the host's clock by then (an agent that lost its journal, or a second agent on
a copy of the spool), its time differs, and `start_ns` stands in the sort key: both copies would
show for ever. So a row that is there keeps its time, and the copies are one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrow_columns import numbers, to_numpy

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa

    from ..spool.cut import CutKey
    from .store import Store

SELECT_TIMES = """
SELECT run_id, epoch, segment, row, any(start_ns) AS start_ns FROM spans
WHERE (run_id, epoch) IN {epochs:Array(Tuple(String, Int32))}
AND step BETWEEN {first_step:Int32} AND {last_step:Int32}
AND (run_id, epoch, segment) IN {segments:Array(Tuple(String, Int32, UInt64))}
GROUP BY run_id, epoch, segment, row
"""


def with_first_times(store: Store, spans: pa.Table, again: Iterable[CutKey]) -> pa.Table:
    """Return the spans with the times of those rows that the store holds already.

    Args:
        store: Where they may be.
        spans: What is to go in, of any cuts.
        again: The cuts among them that may be there.

    Raises:
        StoreError: The store could not be read.
    """
    segments = sorted({(key.run_id, key.epoch, key.segment) for key in again})
    if not segments or not spans.num_rows:
        return spans
    step = to_numpy(spans["step"])
    rows = store.rows(
        SELECT_TIMES,
        {
            "epochs": sorted({(run_id, epoch) for run_id, epoch, _ in segments}),
            "segments": segments,
            "first_step": int(step.min()),
            "last_step": int(step.max()),
        },
    )
    if not rows:
        return spans
    first = {
        (row["run_id"], row["epoch"], row["segment"], row["row"]): row["start_ns"] for row in rows
    }
    identity = (spans[name].to_pylist() for name in ("run_id", "epoch", "segment", "row"))
    own = to_numpy(spans["start_ns"]).tolist()
    start_ns = [
        first.get(row, at) for row, at in zip(zip(*identity, strict=True), own, strict=True)
    ]
    place = spans.schema.get_field_index("start_ns")
    return spans.set_column(place, "start_ns", numbers(np.array(start_ns, dtype=np.int64)))

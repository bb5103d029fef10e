"""Sums of the kernels of a profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.tracer.span import NONE

from .steps import step_range

if TYPE_CHECKING:
    import pyarrow as pa

    from ..identity import Row
    from ..store.store import Store

SELECT_KERNELS = """
SELECT epoch, step, rank, phase, stream, name, num, num_names, total_ns, max_ns, flops, num_bytes,
    dtype
FROM kernels FINAL
WHERE run_id = {run_id:String} AND step >= 0
ORDER BY epoch, step, rank, total_ns DESC, phase, stream, name
"""

SELECT_STEP_KERNELS = """
SELECT step, phase, stream, name, sum(num) AS num, max(num_names) AS num_names,
    sum(total_ns) AS total_ns, max(max_ns) AS max_ns,
    if(countIf(flops IS NULL) > 0, NULL, sum(flops)) AS flops,
    if(countIf(num_bytes IS NULL) > 0, NULL, sum(num_bytes)) AS num_bytes,
    if(uniqExact(dtype) > 1, '', any(dtype)) AS dtype
FROM kernels FINAL
WHERE run_id = {run_id:String} AND step BETWEEN {first:Int32} AND {last:Int32}
    AND ({rank:Int32} < 0 OR rank = {rank:Int32})
GROUP BY step, phase, stream, name
ORDER BY step, phase, stream, name
"""


def read_kernels(store: Store, run_id: str) -> pa.Table:
    """Return the kernels of each step and rank, the busiest first, in the columns of the table."""
    return store.arrow(SELECT_KERNELS, {"run_id": run_id})


def read_step_kernels(
    store: Store, run_id: str, *, first: int | None, last: int | None, rank: int = NONE
) -> list[Row]:
    """Return the sums of each kernel by step, over all ranks, or of one.

    FLOPs and bytes are null if those of any launch are unknown, as a type that differs is "".
    """
    return store.rows(SELECT_STEP_KERNELS, step_range(run_id, first, last) | {"rank": rank})

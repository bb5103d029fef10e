"""Samples of hosts and devices over time: clocks, power, network counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

    from ..store.store import Store

SELECT_SAMPLES = """
SELECT host, device, at_ns, name, value FROM samples FINAL
WHERE run_id IN ({run_id:String}, '') AND at_ns >= {first_ns:Int64} AND at_ns <= {last_ns:Int64}
    AND (run_id != '' OR host IN (
        SELECT DISTINCT host FROM ranks WHERE run_id = {run_id:String}
    ))
    AND (empty({name:String}) OR name = {name:String})
ORDER BY name, host, device, at_ns
"""


def read_samples(
    store: Store, run_id: str, *, first_ns: int, last_ns: int, name: str = ""
) -> pa.Table:
    """Return the samples of a run and of its hosts, by (name, host, device, at_ns).

    Args:
        first_ns: First Unix time.
        last_ns: Last Unix time, included.
        name: Only this quantity; "": all.
    """
    bound = {"run_id": run_id, "first_ns": first_ns, "last_ns": last_ns, "name": name}
    return store.arrow(SELECT_SAMPLES, bound)

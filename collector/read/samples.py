"""Samples of hosts and devices over time: clocks, power, network counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ..arrow_columns import coded_strings, numbers, repeated_string

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

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


def sample_rows(
    run_id: str,
    *,
    host: Sequence[str],
    device: NDArray[np.int32],
    at_ns: NDArray[np.int64],
    name: Sequence[str],
    value: NDArray[np.float64],
) -> pa.Table:
    """Return rows of table ``samples``.

    Args:
        run_id: The run of the samples; "" for samples of a host, whatever runs there.
        host: Shape (rows,).
        device: Shape (rows,): local rank; -1 for the host as a whole.
        at_ns: Shape (rows,): Unix time.
        name: Shape (rows,): the quantity, ending in its unit (``gpu-clock-hz``).
        value: Shape (rows,).
    """
    named = {
        "run_id": repeated_string(run_id, len(at_ns)),
        "host": coded_strings(np.arange(len(host)), host),
        "device": numbers(device, np.int32),
        "at_ns": numbers(at_ns, np.int64),
        "name": coded_strings(np.arange(len(name)), name),
        "value": numbers(value, np.float64),
    }
    return pa.Table.from_arrays(list(named.values()), names=list(named))


def write_samples(store: Store, rows: pa.Table) -> None:
    """Store samples; one replaces an earlier one of the same quantity and time."""
    if rows.num_rows:
        store.insert_arrow("samples", rows)


def read_samples(
    store: Store, run_id: str, *, first_ns: int, last_ns: int, name: str = ""
) -> pa.Table:
    """Return the samples of a run and of its hosts, by (name, host, device, at_ns).

    Args:
        store: The store.
        run_id: The run.
        first_ns: First Unix time.
        last_ns: Last Unix time, included.
        name: Only this quantity; "": all.
    """
    bound = {"run_id": run_id, "first_ns": first_ns, "last_ns": last_ns, "name": name}
    return store.arrow(SELECT_SAMPLES, bound)

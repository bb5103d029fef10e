"""Put the samples of this host into the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..names import storable_name
from ..read.samples import sample_rows, write_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..identity import Row
    from ..store.store import Store
    from .sample import Sample

OF_NO_RUN = ""
"""Whatever runs on the host reads them: see `collector.read.samples.read_samples`."""


def store_sink(store: Store, *, host: str) -> Callable[[Sequence[Sample]], None]:
    """Return what writes samples into ``store``; it raises `StoreError` where it can't.

    Args:
        store: The open store.
        host: As the spool's headers call it.
    """
    stored_host = storable_name(host)

    def write(samples: Sequence[Sample]) -> None:
        rows = sample_rows(
            OF_NO_RUN,
            host=[stored_host] * len(samples),
            device=np.array([sample.device for sample in samples], dtype=np.int32),
            at_ns=np.array([sample.at_ns for sample in samples], dtype=np.int64),
            name=[storable_name(sample.name) for sample in samples],
            value=np.array([sample.value for sample in samples], dtype=np.float64),
        )
        write_samples(store, rows)

    return write


def buffer_sink(
    add: Callable[[Sequence[Row]], None], *, host: str
) -> Callable[[Sequence[Sample]], None]:
    """Return what hands samples on to ``add`` as rows of table ``samples``.

    Args:
        add: Takes rows; it must not wait for anybody.
        host: As the spool's headers call it.
    """
    told_host = storable_name(host)

    def write(samples: Sequence[Sample]) -> None:
        add(
            [
                {
                    "run_id": OF_NO_RUN,
                    "host": told_host,
                    "device": sample.device,
                    "at_ns": sample.at_ns,
                    "name": storable_name(sample.name),
                    "value": sample.value,
                }
                for sample in samples
            ]
        )

    return write

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.collector.host.sample import Sample
from rankscope.collector.host.sampler import store_sink
from rankscope.collector.read.samples import read_samples

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store


def test_samples_of_a_host_are_read_with_any_run_on_it(store: Store) -> None:
    # GIVEN: a run on one host
    store.insert_rows("ranks", [{"run_id": "run-a", "host": "node-1", "process": "p"}])

    # WHEN: two hosts write, one with an odd name
    store_sink(store, host="node-1")(
        [Sample(10, "gpu-clock-hz", 1.7e9, 3), Sample(10, "nic-sent-bytes:e\x1bth0", 5.0)]
    )
    store_sink(store, host="node-2")([Sample(10, "gpu-clock-hz", 1.1e9, 3)])

    # THEN
    rows = read_samples(store, "run-a", first_ns=0, last_ns=20).to_pylist()
    assert [(row["host"], row["device"], row["name"], row["value"]) for row in rows] == [
        ("node-1", 3, "gpu-clock-hz", 1.7e9),
        ("node-1", -1, "nic-sent-bytes:e\\x1bth0", 5.0),
    ]

from __future__ import annotations

import pyarrow as pa

from rankscope.sources.arrow_tables import sample_table


def test_codes_of_samples_ascend_whatever_the_dictionary_of_the_store_is() -> None:
    """A column of several stored parts has its texts in the order in which they were merged."""
    names = pa.array(["clock", "clock", "power", "retries"])
    hosts = pa.array(["h1", "h2", "h1", "h1"])
    table = pa.table(
        {
            "host": pa.DictionaryArray.from_arrays([2, 1, 2, 2], ["", "h2", "h1"]),
            "device": pa.array([0, 0, 0, 0], pa.int32()),
            "at_ns": pa.array([1, 1, 1, 1], pa.int64()),
            "name": pa.DictionaryArray.from_arrays([2, 2, 0, 1], ["power", "retries", "clock"]),
            "value": pa.array([1.0, 2.0, 3.0, 4.0]),
        }
    )

    found = sample_table(table)

    assert found.names == ("clock", "power", "retries")
    assert found.hosts == ("h1", "h2")
    assert [found.names[code] for code in found.name] == names.to_pylist()
    assert [found.hosts[code] for code in found.host] == hosts.to_pylist()

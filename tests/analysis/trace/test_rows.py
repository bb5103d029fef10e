from __future__ import annotations

import numpy as np

from rankscope.analysis.trace.context import SampleTable
from rankscope.analysis.trace.rows import concatenate, select_rows


def samples(*rows: tuple[str, str, int]) -> SampleTable:
    """Return samples of (host, name, at_ns); each table has its own codes."""
    hosts = tuple(dict.fromkeys(host for host, _, _ in rows))
    names = tuple(dict.fromkeys(name for _, name, _ in rows))
    return SampleTable(
        host=np.array([hosts.index(host) for host, _, _ in rows], dtype=np.int32),
        device=np.zeros(len(rows), dtype=np.int32),
        at_ns=np.array([at_ns for _, _, at_ns in rows], dtype=np.int64),
        name=np.array([names.index(name) for _, name, _ in rows], dtype=np.int32),
        value=np.zeros(len(rows)),
        hosts=hosts,
        names=names,
    )


def rows_of(table: SampleTable) -> list[tuple[str, str, int]]:
    return [
        (table.hosts[host], table.names[name], at_ns)
        for host, name, at_ns in zip(
            table.host.tolist(), table.name.tolist(), table.at_ns.tolist(), strict=True
        )
    ]


def test_concatenated_rows_keep_their_texts_though_codes_differ() -> None:
    first = samples(("h0", "power", 1), ("h1", "power", 2))
    second = samples(("h2", "clock", 3), ("h1", "power", 4))

    both = concatenate(first, second)

    assert rows_of(both) == [*rows_of(first), *rows_of(second)]
    assert both.hosts == ("h0", "h1", "h2")


def test_a_table_without_rows_can_be_concatenated_on_either_side() -> None:
    one = samples(("h0", "power", 1))

    assert rows_of(concatenate(samples(), one)) == rows_of(concatenate(one, samples()))


def test_rows_are_selected_by_a_mask_or_by_a_slice() -> None:
    table = samples(("h0", "power", 1), ("h1", "power", 2), ("h2", "clock", 3))

    by_mask = select_rows(table, np.array([False, True, True]))
    by_slice = select_rows(table, slice(1, 3))

    assert rows_of(by_mask) == rows_of(by_slice) == [("h1", "power", 2), ("h2", "clock", 3)]


def test_a_slice_copies_no_column() -> None:
    table = samples(("h0", "power", 1), ("h1", "power", 2))

    assert np.shares_memory(select_rows(table, slice(0, 1)).at_ns, table.at_ns)

"""Where the server's figures come from: its loops, its ingest, its store and its doors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rankscope.collector.errors import StoreError
from rankscope.collector.http.metrics import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rankscope.collector.http.refusals import Refusals
    from rankscope.collector.http.socket_server import EdgeServer
    from rankscope.collector.ingest.service import IngestService
    from rankscope.collector.store.store import Store

    from .listen import Listening
    from .loops import Loop

    Reader = Callable[[], Iterable[Reading]]

NS_PER_S = 1_000_000_000
STORE_PAUSE_NS = 15 * NS_PER_S
"""Between two looks at the store, however often it is scraped."""

SIZES = """
SELECT table, sum(rows) AS num_rows, sum(bytes_on_disk) AS num_bytes, count() AS num_parts
FROM system.parts WHERE active AND database = currentDatabase() GROUP BY table ORDER BY table
"""


def read_loops(loops: Sequence[Loop]) -> Reader:
    """Return the reader of the server's threads: the tail, the analysis, the upkeep."""

    def read() -> Iterable[Reading]:
        yield Reading(
            name="loop_up",
            text="1 where a thread of the server does its work, 0 where it fails or has ended.",
            label="loop",
            values={loop.name: float(loop.why_stopped() is None) for loop in loops},
        )
        yield Reading(
            name="loop_turns_total",
            text="Turns of a thread of the server.",
            label="loop",
            values={loop.name: loop.num_turns for loop in loops},
        )
        yield Reading(
            name="loop_failures_total",
            text="Turns that failed and are tried again.",
            label="loop",
            values={loop.name: loop.num_failures for loop in loops},
        )
        yield Reading(
            name="loop_busy_seconds_total",
            text="Time in turns of a thread of the server.",
            label="loop",
            values={loop.name: loop.busy_ns / NS_PER_S for loop in loops},
        )
        brought = [loop.counts for loop in loops if loop.counts]
        if brought:
            yield Reading(
                name="spool_rows_total",
                text="Rows that the tail took from the spool, by what became of them;"
                " refused_files: files that it can't read, and left.",
                label="kind",
                values={name: count for counts in brought for name, count in counts.items()},
            )

    return read


def read_ingest(service: IngestService) -> Reader:
    """Return the reader of what agents send."""

    def read() -> Iterable[Reading]:
        counts = service.counts
        yield Reading(
            name="ingest_requests_total",
            text="Requests of agents.",
            values={"": counts.num_requests},
        )
        yield Reading(
            name="ingest_bytes_total", text="Bytes of their bodies.", values={"": counts.num_bytes}
        )
        yield Reading(
            name="ingest_spans_total", text="Spans in them.", values={"": counts.num_spans}
        )
        yield Reading(
            name="ingest_bad_rows_total",
            text="Rows set aside with their reason.",
            values={"": counts.num_bad_rows},
        )
        yield Reading(
            name="ingest_cuts_total",
            text="Cuts, by what became of them.",
            label="state",
            values=dict(counts.cuts),
        )
        yield Reading(
            name="ingest_refusals_total",
            text="Requests of agents that were refused, by status.",
            label="status",
            values={str(status): count for status, count in counts.refusals.items()},
        )
        yield Reading(
            name="ingest_under_way_bytes",
            text="Bytes of agents' requests under way, as sent and as inflated.",
            label="form",
            values={
                "wire": service.wire_budget.taken_bytes,
                "inflated": service.inflated_budget.taken_bytes,
            },
        )

    return read


def read_store(store: Store, *, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> Reader:
    """Return the reader of the store's size; it looks every `STORE_PAUSE_NS` at most.

    Args:
        store: An open store.
        monotonic_ns: Clock of the pause.
    """
    known: list[Reading] = []
    looked_ns: int | None = None

    def read() -> Iterable[Reading]:
        nonlocal known, looked_ns
        now_ns = monotonic_ns()
        if looked_ns is None or now_ns - looked_ns >= STORE_PAUSE_NS:
            known, looked_ns = _sizes(store), now_ns
        return known

    return read


def _sizes(store: Store) -> list[Reading]:
    try:
        found = store.rows(SIZES)
    except StoreError:
        found = None
    up = Reading(
        name="store_up",
        text="1 where the store answers.",
        values={"": float(found is not None)},
    )
    if found is None:
        return [up]
    texts = {
        "num_rows": ("store_rows", "Rows by table, repeated ones counted."),
        "num_bytes": ("store_bytes", "Bytes on disk by table."),
        "num_parts": ("store_parts", "Parts by table; many of them make reading slow."),
    }
    return [
        up,
        *(
            Reading(
                name=name,
                text=text,
                label="table",
                values={str(row["table"]): float(row[column]) for row in found},
            )
            for column, (name, text) in texts.items()
        ),
    ]


def read_edge(server: EdgeServer, doors: Listening, refusals: Refusals) -> Reader:
    """Return the reader of connections, refusals and the certificate's end."""

    def read() -> Iterable[Reading]:
        yield Reading(
            name="connections",
            text="Connections that are open.",
            values={"": server.num_connections},
        )
        yield Reading(
            name="refused_total",
            text="Who was turned away or cut off, by why.",
            label="reason",
            values={str(reason): count for reason, count in refusals.counts.items()},
        )
        if doors.renewal is not None:
            yield Reading(
                name="certificate_expires_seconds",
                text="Unix time at which the server's certificate ends.",
                values={"": doors.renewal.served.expires_s},
            )

    return read

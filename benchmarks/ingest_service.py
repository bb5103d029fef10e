"""Rate of the ingest service, relative to a bare `insert_arrow`, and time of decoding a body.

    python -m benchmarks.ingest_service [--bodies 32] [--senders 8] [--rounds 5] [--json FILE]

A round compares two variants in the order A B B A: all bodies through `POST /v1/spans` (gate,
decoding, ledger, group commit, answers; no network), and the same rows by `insert_arrow`, 262,144
at a time. One body is also decoded and checked alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from benchmarks.intervals import median_interval
from rankscope.collector.ingest.router import ARROW_TYPE
from rankscope.collector.ingest.screening import screen
from rankscope.collector.ingest.service import ServiceLimits
from rankscope.collector.store.store import open_store
from rankscope.collector.wire.codec import decode_batch, encode_cuts
from tests.support.collector.cut_builder import span_cut
from tests.support.collector.serving import OWN, serving

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope.collector.spool.cut import Cut
    from rankscope.collector.store.store import Store
    from tests.support.collector.serving import Collector

CUTS_A_BODY = 16
ROWS_A_CUT = 4_096
NAMES = [f"name {number % 40}" for number in range(ROWS_A_CUT)]
BODIES_AN_INSERT = 4
DECODE_ROUNDS = 15


def cuts_of(run_id: str, body: int) -> list[Cut]:
    """Return the cuts of one body: one of each of 16 segments, as from 16 ranks."""
    first_row = body * ROWS_A_CUT
    return [
        span_cut(run_id, first_row, first_row + ROWS_A_CUT, names=NAMES, segment=rank, rank=rank)
        for rank in range(CUTS_A_BODY)
    ]


async def send(collector: Collector, bodies: list[bytes], *, num_senders: int) -> None:
    """Send all bodies with a fixed number of senders."""
    turn = asyncio.Semaphore(num_senders)
    headers = {"authorization": f"Bearer {OWN}", "content-type": ARROW_TYPE}
    async with collector.visitor() as visitor:

        async def one(body: bytes) -> None:
            async with turn:
                answer = await visitor.post("/v1/spans", content=body, headers=headers)
                if answer.status_code != 200:
                    raise RuntimeError(answer.text)

        await asyncio.gather(*(one(body) for body in bodies))


def send_all(collector: Collector, bodies: list[bytes], num_senders: int) -> None:
    """Send all bodies in a new event loop."""
    asyncio.run(send(collector, bodies, num_senders=num_senders))


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def insert_bare(store: Store, tables: list[pa.Table]) -> None:
    """Insert the same rows without the service."""
    for first in range(0, len(tables), BODIES_AN_INSERT):
        part = pa.concat_tables(tables[first : first + BODIES_AN_INSERT])
        store.insert_arrow("spans", part.unify_dictionaries())


def measure_service(num_bodies: int, *, num_senders: int, num_rounds: int) -> dict[str, Any]:
    """Return the rates of both variants and the ratio of their times."""
    rates: list[float] = []
    ratios: list[float] = []
    num_spans = num_bodies * CUTS_A_BODY * ROWS_A_CUT
    with (
        tempfile.TemporaryDirectory() as folder,
        open_store(f"chdb://{folder}/store") as store,
        serving(store, limits=ServiceLimits()) as collector,
    ):
        for number in range(num_rounds):
            runs = [f"run-{number}-{half}" for half in range(2)]
            tables = [
                pa.concat_tables([cut.rows.spans for cut in cuts_of(f"bare-{number}", body)])
                for body in range(num_bodies)
            ]
            took: dict[str, float] = {"service": 0.0, "bare": 0.0}
            for way in ("service", "bare", "bare", "service"):
                if way == "bare":
                    took[way] += seconds(partial(insert_bare, store, tables))
                    continue
                run_id = runs.pop()
                bodies = [encode_cuts(cuts_of(run_id, body)) for body in range(num_bodies)]
                took[way] += seconds(partial(send_all, collector, bodies, num_senders))
            rates.append(2 * num_spans / took["service"])
            ratios.append(took["bare"] / took["service"])
            store.command("TRUNCATE TABLE spans")
        num_groups = collector.service.commit.num_inserts["spans"]
    return {
        "spans_a_round": 2 * num_spans,
        "spans_per_s": round(statistics.median(rates)),
        "bare_over_service": round(statistics.median(ratios), 3),
        "bare_over_service_95": [round(bound, 3) for bound in median_interval(ratios)],
        "requests_an_insert": round(2 * num_bodies * num_rounds / num_groups, 1),
    }


def measure_decoding() -> dict[str, Any]:
    """Return the time of decoding and checking one body."""
    body = encode_cuts(cuts_of("decoded", 0))
    took_ms = [seconds(lambda: screen(decode_batch(body))) * 1e3 for _ in range(DECODE_ROUNDS)]
    num_spans = CUTS_A_BODY * ROWS_A_CUT
    return {
        "spans": num_spans,
        "body_bytes_a_span": round(len(body) / num_spans, 2),
        "decode_ms": round(statistics.median(took_ms), 2),
        "decode_ms_95": [round(bound, 2) for bound in median_interval(took_ms)],
        "decoded_spans_per_s": round(num_spans / statistics.median(took_ms) * 1e3),
    }


def main() -> None:
    """Print the result as JSON, and write it to a file if requested."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--bodies", type=int, default=32, help="of 65,536 spans each")
    parser.add_argument("--senders", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    before = os.getloadavg()
    found = {
        "decoding": measure_decoding(),
        "service": measure_service(
            options.bodies, num_senders=options.senders, num_rounds=options.rounds
        ),
    }
    document = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": {"before": before, "after": os.getloadavg()},
        "python": platform.python_version(),
        "chdb": version("chdb"),
        "pyarrow": pa.__version__,
        **found,
    }
    text = json.dumps(document, indent=1) + "\n"
    sys.stdout.write(text)
    if options.json is not None:
        options.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

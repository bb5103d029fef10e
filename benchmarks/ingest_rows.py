"""Samples of many hosts: bodies and inserts per second, with and without group commit.

    python -m benchmarks.ingest_rows [--senders 64] [--seconds 10] [--rounds 3] [--json FILE]

Each sender is a host: it posts 60 sample rows to `POST /v1/rows/samples` (gate, JSON, checks,
store; no network), and the next 60 when it is answered. A round compares the service with one that
makes an insert for each body, in the order A B B A. The same hosts also send one body per second
each, as real hosts do.
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
from collections import Counter
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.intervals import median_interval
from rankscope.collector.ingest.service import ServiceLimits
from rankscope.collector.store.store import open_store
from tests.support.collector.serving import OWN, serving

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.collector.identity import Row
    from rankscope.collector.ingest.service import IngestService
    from rankscope.collector.store.store import Store
    from tests.support.collector.serving import Collector

ROWS_A_BODY = 60
PATH = "/v1/rows/samples"
HEADERS = {"authorization": f"Bearer {OWN}", "content-type": "application/json"}
NUM_PARTS = """
SELECT count() AS num_parts FROM system.parts WHERE table = 'samples' AND active
"""


class InsertEach:
    """A store that makes one insert per body."""

    def __init__(self, service: IngestService, store: Store) -> None:
        self._service = service
        self._store = store
        self.num_inserts: Counter[str] = Counter()
        self.is_running = True

    def submit(self, table: str, rows: Sequence[Row], *, num_rows: int) -> Future[int]:
        """Insert the rows of one body."""
        loop = asyncio.get_running_loop()
        done: Future[int] = Future()

        def insert() -> None:
            self._store.insert_rows(table, rows)
            self.num_inserts[table] += 1
            done.set_result(num_rows)

        loop.run_in_executor(self._service._threads, insert)
        return done


def body_of(host: int, second: int) -> bytes:
    """Return the samples of one host in one second."""
    rows = [
        {
            "run_id": "",
            "host": f"host-{host:04d}",
            "device": number % 8,
            "at_ns": 1_700_000_000_000_000_000 + second * 1_000_000_000 + number,
            "name": f"sample-{number}",
            "value": number * 0.37,
        }
        for number in range(ROWS_A_BODY)
    ]
    return json.dumps({"schema": 1, "rows": rows}).encode()


async def _post_until(
    collector: Collector, until_s: float, *, num_senders: int, period_s: float
) -> list[float]:
    """Post as all hosts until a time, and return the seconds until each answer."""
    waits: list[float] = []
    async with collector.visitor() as visitor:

        async def one(host: int) -> None:
            next_s = time.monotonic() + period_s * host / num_senders
            second = 0
            while time.monotonic() < until_s:
                await asyncio.sleep(max(next_s - time.monotonic(), 0.0))
                began_s = time.monotonic()
                answer = await visitor.post(PATH, content=body_of(host, second), headers=HEADERS)
                if answer.status_code != 200:
                    raise RuntimeError(answer.text)
                waits.append(time.monotonic() - began_s)
                next_s = max(next_s, began_s) + period_s
                second += 1

        await asyncio.gather(*(one(host) for host in range(num_senders)))
    return waits


def measured(
    collector: Collector, *, num_senders: int, seconds: float, period_s: float
) -> dict[str, float]:
    """Return bodies and inserts per second, and the time of an answer."""
    commit = collector.service.commit
    before, began_s = commit.num_inserts["samples"], time.monotonic()
    waits = asyncio.run(
        _post_until(collector, began_s + seconds, num_senders=num_senders, period_s=period_s)
    )
    took_s = time.monotonic() - began_s
    return {
        "bodies_per_s": len(waits) / took_s,
        "inserts_per_s": (commit.num_inserts["samples"] - before) / took_s,
        "answer_p50_s": statistics.median(waits),
        "answer_max_s": max(waits),
    }


def compare(*, num_senders: int, seconds: float, num_rounds: int) -> dict[str, Any]:
    """Return the medians of both variants, and the ratio of their bodies per second."""
    found: dict[str, list[dict[str, float]]] = {"grouped": [], "each": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        open_store(f"chdb://{folder}/store") as store,
        serving(store, limits=ServiceLimits()) as collector,
    ):
        service = collector.service
        grouped, each = service.commit, InsertEach(service, store)
        parts: dict[str, list[int]] = {"grouped": [], "each": []}
        for _ in range(num_rounds):
            for way in ("grouped", "each", "each", "grouped"):
                service.commit = grouped if way == "grouped" else each  # type: ignore[assignment]
                result = measured(collector, num_senders=num_senders, seconds=seconds, period_s=0.0)
                found[way].append(result)
                parts[way].append(store.rows(NUM_PARTS)[0]["num_parts"])
                store.command("TRUNCATE TABLE samples")
        service.commit = grouped
        steady = measured(collector, num_senders=num_senders, seconds=seconds, period_s=1.0)
    ratios = [
        (found["grouped"][k]["bodies_per_s"] + found["grouped"][k + 1]["bodies_per_s"])
        / (found["each"][k]["bodies_per_s"] + found["each"][k + 1]["bodies_per_s"])
        for k in range(0, 2 * num_rounds, 2)
    ]
    ways: dict[str, Any] = {
        way: {name: _median(runs, name) for name in runs[0]} | {"parts_left": max(parts[way])}
        for way, runs in found.items()
    }
    return {
        **ways,
        "bodies_grouped_over_each": round(statistics.median(ratios), 2),
        "bodies_grouped_over_each_95": [round(bound, 2) for bound in median_interval(ratios)],
        "one_body_a_second_each": {name: round(value, 3) for name, value in steady.items()},
    }


def _median(runs: list[dict[str, float]], name: str) -> float:
    return round(statistics.median(run[name] for run in runs), 3)


def main() -> None:
    """Print the result as JSON, and write it to a file if requested."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--senders", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0, help="of one way in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    before = os.getloadavg()
    found = compare(num_senders=options.senders, seconds=options.seconds, num_rounds=options.rounds)
    document = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": {"before": before, "after": os.getloadavg()},
        "python": platform.python_version(),
        "chdb": version("chdb"),
        "senders": options.senders,
        "rows_a_body": ROWS_A_BODY,
        **found,
    }
    text = json.dumps(document, indent=1) + "\n"
    sys.stdout.write(text)
    if options.json is not None:
        options.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

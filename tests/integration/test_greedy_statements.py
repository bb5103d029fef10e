"""Statements of a client with a `sql` token that take memory: ingest goes on beside them."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from rankscope.collector.ingest.router import ARROW_TYPE
from rankscope.collector.wire.codec import encode_cuts
from tests.integration.programs import TIMEOUT_S, rankscope, serving
from tests.support.collector.cut_builder import span_cut

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.programs import Server

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

MIB = 1 << 20
SERVER_LIMIT_BYTES = 3 << 30
"""Resident memory at which the test kills the server, as a machine of this size would."""

GROWTH_BYTES = 768 * MIB
"""Largest growth by one statement. Each of them took more than 1 GiB before."""

BIG = "repeat('x', 1000000)"
SEARCH = f"position({BIG}, toString(number))"


def times(part: str, num: int, *, by: str = ", ") -> str:
    return by.join([part] * num)


def chain(leaf: str, function: str, *, tail: str = "") -> str:
    """Return a statement whose query tree has 1,111 nodes because of its aliases."""
    aliases = [f"{leaf} AS a0"]
    aliases += [f"{function}({times(f'a{i}', 10)}) AS a{i + 1}" for i in range(3)]
    return f"WITH {', '.join(aliases)} SELECT ignore(a3){tail}"


GREEDY = {
    "the statement of the attack": f"WITH {BIG} AS a, concat({times('a', 10)}) AS b,"
    f" concat({times('b', 10)}) AS c, concat({times('c', 10)}) AS d, concat({times('d', 10)}) AS e"
    " SELECT length(e)",
    "aliases": chain(BIG, "concat"),
    "aliases of a constant that is not folded": chain(f"materialize({BIG})", "concat"),
    "aliases beside a column": chain(SEARCH, "greatest", tail=" FROM numbers(1)"),
    "an array": f"WITH {BIG} AS a SELECT length([{times('a', 900)}])",
    "no alias": f"SELECT greatest({times(SEARCH, 600)}) FROM numbers(1)",
    "subqueries": f"SELECT {times(f'(SELECT greatest({times(SEARCH, 60)}) FROM numbers(1))', 12)}",
    "a common table expression": f"WITH c AS (SELECT greatest({times(SEARCH, 60)}) AS q"
    f" FROM numbers(1)) SELECT c0.q FROM {', '.join(f'c AS c{i}' for i in range(12))}",
    "a union": times(f"SELECT greatest({times(SEARCH, 60)}) FROM numbers(1)", 12, by=" UNION ALL "),
    "lambdas": f"SELECT {times(f'arrayMap(x -> greatest({times(SEARCH, 60)}), [1])', 12)}"
    " FROM numbers(1)",
    "columns": f"SELECT {times(f'* REPLACE (greatest({times(SEARCH, 60)}) AS number)', 12)}"
    " FROM numbers(1)",
    "a scalar of the store": "WITH (SELECT arrayStringConcat(groupArray(repeat('x', 1000)))"
    f" FROM numbers(1000)) AS s SELECT greatest({times('position(s, toString(number))', 900)})"
    " FROM numbers(1)",
}
"""The engine copies a constant into each node of a query tree; these have 1,000 nodes or more."""


def memory_bytes(server: Server, name: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` of a server."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii").splitlines()
    (found,) = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found) * 1024


@contextmanager
def limited(server: Server) -> Iterator[None]:
    """Kill the server if it exceeds `SERVER_LIMIT_BYTES` in this block."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02) and server.process.poll() is None:
            if memory_bytes(server, "VmRSS") > SERVER_LIMIT_BYTES:
                server.process.kill()

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()


def test_statements_whose_constants_grow_are_refused_and_ingest_goes_on(tmp_path: Path) -> None:
    store = tmp_path / "store"
    token = rankscope("token", "create", "--role", "sql", store=store).stdout.split()[-1]
    reader = {"authorization": f"Bearer {token}"}
    with serving("--only", "collector", store=store) as server, limited(server):
        assert httpx.post(server.url, content="SELECT 1", headers=reader).text == "1\n"
        before = memory_bytes(server, "VmHWM")
        done = threading.Event()
        statuses: list[int] = []

        def ingest() -> None:
            headers = {**server.bearer, "content-type": ARROW_TYPE}
            while not done.wait(0.05):
                body = encode_cuts([span_cut("job", len(statuses) * 10, len(statuses) * 10 + 10)])
                sent = httpx.post(
                    f"{server.url}/v1/spans", content=body, headers=headers, timeout=TIMEOUT_S
                )
                statuses.append(sent.status_code)

        ingesting = threading.Thread(target=ingest)
        ingesting.start()
        found = {}
        try:
            for name, text in GREEDY.items():
                answer = httpx.post(server.url, content=text, headers=reader, timeout=TIMEOUT_S)
                grown = memory_bytes(server, "VmHWM") - before
                assert grown < GROWTH_BYTES, (name, grown, answer.text[:200])
                found[name] = answer.headers["x-clickhouse-exception-code"]
        finally:
            done.set()
            ingesting.join()

        refused = {"columns": "164"}  # REPLACE, whatever it multiplies
        assert found == dict.fromkeys(GREEDY, "36") | refused
        assert set(statuses) == {200}
        stored = httpx.post(server.url, content="SELECT count() FROM spans", headers=reader)
        assert stored.text == f"{len(statuses) * 10}\n"

"""Bodies that are too large, or of another type."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from rankscope.collector.ingest.service import ServiceLimits
from rankscope.collector.wire.codec import WireLimits, encode_cuts
from tests.support.collector.cut_builder import span_cut
from tests.support.collector.serving import OWN, pieces, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from rankscope.collector.store.store import Store
    from tests.support.collector.serving import Collector

pytestmark = pytest.mark.slow

KIB = 1 << 10
MIB = 1 << 20
SMALL = ServiceLimits(
    wire=WireLimits(max_wire_bytes=64 * KIB, max_inflated_bytes=4 * MIB, max_rows=20_000),
    max_wire_bytes_in_progress=128 * KIB,
    max_inflated_bytes_in_progress=8 * MIB,
)


@pytest.fixture(scope="module")
def collector(store: Store) -> Iterator[Collector]:
    with serving(store, limits=SMALL) as served:
        yield served


def works(collector: Collector, run_id: str) -> bool:
    return collector.ship(span_cut(run_id, 0, 1)).status_code == 200


# --- too large


def test_a_body_that_declares_too_many_bytes_is_refused_unread(
    collector: Collector, run_id: str
) -> None:
    async def endless() -> Any:  # noqa: ANN401 -- an iterator
        yield b"x"
        raise AssertionError("the body was read")

    answer = collector.post("/v1/spans", endless(), **{"content-length": str(1 << 40)})

    assert answer.status_code == 413
    assert works(collector, run_id)


def test_an_endless_body_is_read_no_further_than_the_limit(
    collector: Collector, run_id: str
) -> None:
    read = 0

    async def endless() -> Any:  # noqa: ANN401 -- an iterator
        nonlocal read
        while True:
            read += 16 * KIB
            yield bytes(16 * KIB)

    answer = collector.post("/v1/spans", endless())

    assert answer.status_code == 413
    assert read <= 64 * KIB + 2 * 16 * KIB
    assert works(collector, run_id)


def test_a_body_may_come_in_many_chunks(collector: Collector, run_id: str) -> None:
    body = encode_cuts([span_cut(run_id, 0, 9)])

    answer = collector.post("/v1/spans", pieces(body, size=100))

    assert answer.status_code == 200


def test_a_body_that_inflates_too_much_is_413(collector: Collector, run_id: str) -> None:
    bomb = encode_cuts([span_cut(run_id, 0, 1, names=["x" * (5 * MIB)])])
    assert len(bomb) < 64 * KIB

    answer = collector.post("/v1/spans", bomb)

    assert answer.status_code == 413
    assert "inflates to more than" in answer.json()["error"]
    assert collector.service.inflated_budget.taken_bytes == 0
    assert works(collector, run_id)


def test_requests_beyond_the_budget_get_429(store: Store, run_id: str) -> None:
    body = encode_cuts([span_cut(run_id, 0, 3)])

    async def crowd(served: Collector) -> list[int]:
        """Send five bodies of 40 KiB whose last bytes wait for the first answer."""
        gate = asyncio.Event()

        async def held_back() -> Any:  # noqa: ANN401 -- an iterator
            yield body
            await gate.wait()
            yield bytes(40 * KIB - len(body))

        async def ask(visitor: httpx.AsyncClient) -> int:
            headers = {
                "authorization": f"Bearer {OWN}",
                "content-type": "application/vnd.apache.arrow.stream",
                "content-length": str(40 * KIB),
            }
            answer = await visitor.post("/v1/spans", content=held_back(), headers=headers)
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
            return answer.status_code

        async with served.visitor() as visitor:
            asked = [asyncio.create_task(ask(visitor)) for _ in range(5)]
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            first = [task.result() for task in done]
            assert set(first) == {429}
            gate.set()
            return sorted(await asyncio.gather(*asked))

    with serving(store, limits=SMALL) as served:
        answers = asyncio.run(crowd(served))
        assert works(served, run_id)
        assert served.service.wire_budget.taken_bytes == 0
        assert served.service.inflated_budget.taken_bytes == 0

    assert answers == [200, 200, 200, 429, 429]


# --- another type


@pytest.mark.parametrize("media", ["application/json", "text/plain", "", "application/x-gzip"])
def test_another_content_type_is_415(collector: Collector, run_id: str, media: str) -> None:
    answer = collector.post("/v1/spans", encode_cuts([span_cut(run_id, 0, 1)]), media=media)

    assert answer.status_code == 415


@pytest.mark.parametrize("body", [b"", b"{}", b"\x1f\x8b" + bytes(90), b"\xff" * 200])
def test_a_body_that_is_not_a_stream_is_422(collector: Collector, run_id: str, body: bytes) -> None:
    assert collector.post("/v1/spans", body).status_code == 422
    assert works(collector, run_id)


def test_a_future_schema_version_is_rejected_with_the_supported_ones(
    collector: Collector, run_id: str
) -> None:
    body = encode_cuts([span_cut(run_id, 0, 1)])
    whole = pa.ipc.open_stream(body).read_all()
    whole = whole.replace_schema_metadata({b"rankscope.schema": b"9"})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, whole.schema) as writer:
        writer.write_table(whole)

    answer = collector.post("/v1/spans", sink.getvalue().to_pybytes())

    assert answer.status_code == 422
    assert answer.json()["supported"] == [1, 1]
    assert "version 9" in answer.json()["error"]

"""Bodies that are too large, of another type, or made to break the decoder."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.collector.errors import WireError
from rankscope.collector.ingest.backoff import BusyError
from rankscope.collector.ingest.decoder import Decoder, DecoderPool
from rankscope.collector.ingest.service import ServiceLimits
from rankscope.collector.ingest.shared_memory import create_memory, seal
from rankscope.collector.wire.codec import DEFAULT_LIMITS, WireLimits, decode_batch, encode_cuts
from tests.support.collector.cut_builder import span_cut
from tests.support.collector.serving import OWN, pieces, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import httpx

    from rankscope.collector.store.store import Store
    from rankscope.collector.wire.codec import CutBatch
    from tests.support.collector.serving import Collector

pytestmark = pytest.mark.slow

KIB = 1 << 10
MIB = 1 << 20
SMALL = ServiceLimits(
    wire=WireLimits(max_wire_bytes=64 * KIB, max_inflated_bytes=4 * MIB, max_rows=20_000),
    max_wire_bytes_in_progress=128 * KIB,
    max_inflated_bytes_in_progress=8 * MIB,
    num_decoders=1,
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


def test_a_declared_size_of_exabytes_is_refused(collector: Collector, run_id: str) -> None:
    """The eight bytes before each compressed buffer declare its inflated size."""
    body = bytearray(encode_cuts([span_cut(run_id, 0, 2_000)]))
    magic = body.find(b"\x28\xb5\x2f\xfd")  # the start of a zstd frame
    while magic >= 0:
        struct.pack_into("<q", body, magic - 8, 1 << 62)
        magic = body.find(b"\x28\xb5\x2f\xfd", magic + 4)

    answer = collector.post("/v1/spans", bytes(body))

    assert answer.status_code == 413
    assert "inflates to more than" in answer.json()["error"]
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


# --- malicious


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_flipped_bytes_never_break_the_service(collector: Collector, data: st.DataObject) -> None:
    body = bytearray(encode_cuts([span_cut("fuzzed", 0, 40), span_cut("fuzzed", 40, 50)]))
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(body)), st.integers(0, len(body))))

    answer = collector.post("/v1/spans", bytes(body[:end]))

    assert answer.status_code in {200, 409, 413, 422}, answer.text


def plain_body(run_id: str) -> bytearray:
    """Return a body without compression, so that its buffers can be forged."""
    whole = pa.ipc.open_stream(encode_cuts([span_cut(run_id, 0, 64)])).read_all()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, whole.schema) as writer:
        writer.write_table(whole)
    return bytearray(sink.getvalue().to_pybytes())


@pytest.mark.parametrize("forged", [0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1_000])
def test_offsets_and_codes_out_of_range_are_rejected(
    collector: Collector, run_id: str, forged: int
) -> None:
    """Forge words of the record batch in turn: offsets, dictionary codes, lengths."""
    body = plain_body(run_id)
    statuses = set()
    places = range(len(body) - 8_000, len(body) - 16, 4 * 61)
    for place in places:
        broken = body.copy()
        struct.pack_into("<I", broken, place - place % 4, forged)
        statuses.add(collector.post("/v1/spans", bytes(broken)).status_code)

    assert statuses <= {200, 409, 413, 422}
    assert works(collector, f"{run_id}-after")


class FragileDecoder(Decoder):
    """A decoder whose process dies at the next ``num_deaths_left`` bodies."""

    num_deaths_left: int = 0

    def decode(self, body: int, limits: WireLimits) -> CutBatch:
        if FragileDecoder.num_deaths_left:
            FragileDecoder.num_deaths_left -= 1
            super().decode(body, limits)
            os.kill(self.pid or 0, 9)
        return super().decode(body, limits)


class StoppedDecoder(Decoder):
    """A decoder whose process is stopped at its start."""

    def _start(self) -> None:
        super()._start()
        assert self.pid is not None
        os.kill(self.pid, signal.SIGSTOP)


class AskedDecoder(Decoder):
    """A decoder that reports when it was given a body."""

    def __init__(self) -> None:
        super().__init__()
        self.was_asked = threading.Event()

    def decode(self, body: int, limits: WireLimits) -> CutBatch:
        self.was_asked.set()
        return super().decode(body, limits)


@pytest.fixture
def pool() -> Iterator[DecoderPool]:
    made = DecoderPool(1, make=FragileDecoder)
    yield made
    made.close()


def memory(content: bytes) -> int:
    descriptor = create_memory("body")
    os.write(descriptor, content)
    seal(descriptor)
    return descriptor


@pytest.fixture
def body(run_id: str) -> Iterator[int]:
    descriptor = memory(encode_cuts([span_cut(run_id, 0, 5)]))
    yield descriptor
    os.close(descriptor)


def test_a_body_is_retried_after_its_decoder_died_once(pool: DecoderPool, body: int) -> None:
    FragileDecoder.num_deaths_left = 1

    assert pool.decode(body, DEFAULT_LIMITS).num_rows == 5
    assert pool.num_deaths == 1


def test_a_body_that_kills_two_decoders_is_rejected_from_then_on(
    pool: DecoderPool, body: int
) -> None:
    FragileDecoder.num_deaths_left = 2
    for _ in range(2):
        with pytest.raises(WireError, match="decoder") as caught:
            pool.decode(body, DEFAULT_LIMITS)
        assert caught.value.status == 422
    assert pool.num_deaths == 2

    other = memory(encode_cuts([span_cut("other", 0, 3)]))
    assert pool.decode(other, DEFAULT_LIMITS).num_rows == 3
    os.close(other)


def test_a_decoder_that_does_not_answer_is_killed(body: int) -> None:
    decoder = StoppedDecoder(timeout_s=0.1)
    pool = DecoderPool(1, make=lambda: decoder)

    with pytest.raises(WireError, match="did not answer"):
        pool.decode(body, DEFAULT_LIMITS)
    assert decoder.pid is None
    assert pool.num_deaths == 2


def test_closing_the_pool_fails_waiting_threads_at_once(body: int) -> None:
    """The decoder is stopped, as if it took long for a body; its user gets an error at once."""
    pool = DecoderPool(1, make=AskedDecoder)
    pool.decode(body, DEFAULT_LIMITS)
    (decoder,) = pool.all
    assert isinstance(decoder, AskedDecoder)
    assert decoder.pid is not None
    decoder.was_asked.clear()
    os.kill(decoder.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(max_workers=2) as threads:
        waiting = [threads.submit(pool.decode, body, DEFAULT_LIMITS) for _ in range(2)]
        assert decoder.was_asked.wait(30)
        pool.close()
        for future in waiting:
            with pytest.raises(BusyError, match="shutting down"):
                future.result(30)
    assert decoder.pid is None


def test_a_decoder_returns_the_same_batch_as_decoding_in_process(
    pool: DecoderPool, run_id: str
) -> None:
    FragileDecoder.num_deaths_left = 0
    cuts = [span_cut(run_id, 0, 50), span_cut(run_id, 50, 50 + 7, segment=2**64 - 1, rank=3)]
    content = encode_cuts(cuts)
    descriptor = memory(content)
    handed, here = pool.decode(descriptor, DEFAULT_LIMITS), decode_batch(content)
    os.close(descriptor)

    assert (handed.keys, handed.sha256, handed.num_torn) == (here.keys, here.sha256, here.num_torn)
    for table, rows in here.tables.items():
        assert handed.tables[table].to_pylist() == rows.to_pylist()
        assert handed.offsets[table].tolist() == here.offsets[table].tolist()


def test_limits_hold_in_the_decoder_too(pool: DecoderPool, body: int) -> None:
    FragileDecoder.num_deaths_left = 0
    refuse: Callable[[], object] = lambda: pool.decode(body, replace(DEFAULT_LIMITS, max_rows=4))  # noqa: E731
    with pytest.raises(WireError, match="more than 4 rows") as caught:
        refuse()
    assert caught.value.status == 413

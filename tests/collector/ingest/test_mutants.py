"""Arrow streams with one forged value: the service rejects each and goes on.

The streams are built here and then broken, so they follow changes of the wire format.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pytest

from rankscope.collector.ingest.service import ServiceLimits
from rankscope.collector.wire.codec import WireLimits, encode_cuts
from tests.support.collector.cut_builder import span_cut
from tests.support.collector.serving import OWN, serving

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rankscope.collector.store.store import Store

    Codec = Literal["lz4", "zstd"] | None
    from tests.support.collector.serving import Collector

MIB = 1 << 20
NOTHING = 0
DEADLINE_S = 60.0
REFUSED = {413, 422}
TAKEN = {200, 409}
"""Answers to a body that is unharmed, or wrong in a value only."""

LIMITS = ServiceLimits(
    wire=WireLimits(max_wire_bytes=1 * MIB, max_inflated_bytes=4 * MIB, max_rows=20_000),
    max_wire_bytes_in_progress=4 * MIB,
    max_inflated_bytes_in_progress=16 * MIB,
)
CONTINUATION = b"\xff\xff\xff\xff"
FORGED = (1, 0x7FFFFFFF, 0xFFFFFFFF)


@pytest.fixture(scope="module")
def collector(store: Store) -> Iterator[Collector]:
    with serving(store, limits=LIMITS) as served:
        yield served


def statuses(collector: Collector, bodies: Iterable[bytes]) -> list[int]:
    """Post bodies one after another; return the statuses, with 0 for a 200 without any cut.

    Raises:
        TimeoutError: A body was not answered in time.
    """

    async def post_all() -> list[int]:
        headers = {
            "authorization": f"Bearer {OWN}",
            "content-type": "application/vnd.apache.arrow.stream",
        }
        found = []
        async with collector.visitor() as visitor:
            for body in bodies:
                async with asyncio.timeout(DEADLINE_S):
                    answer = await visitor.post("/v1/spans", content=body, headers=headers)
                is_empty = answer.status_code == 200 and not answer.json()["cuts"]
                found.append(NOTHING if is_empty else answer.status_code)
        return found

    return asyncio.run(post_all())


def assert_goes_on(collector: Collector, run_id: str) -> None:
    """Check that the service stores, and that no rejected body still counts in its budgets."""
    assert collector.ship(span_cut(run_id, 0, 3)).json()["cuts"][0]["state"] == "stored"
    assert collector.service.wire_budget.taken_bytes == 0
    assert collector.service.inflated_budget.taken_bytes == 0


def stream(*batches: pa.RecordBatch, codec: Codec = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=codec, emit_dictionary_deltas=True)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def cut_table(run_id: str, *, num_rows: int = 8) -> pa.Table:
    """Return a cut of some spans as a body has it."""
    return pa.ipc.open_stream(encode_cuts([span_cut(run_id, 0, num_rows)])).read_all()


def of_table(table: pa.Table, *, codec: Codec = None) -> bytes:
    return stream(*table.combine_chunks().to_batches(), codec=codec)


def headers(body: bytes) -> list[tuple[int, int]]:
    """Return begin and end of the header of each message."""
    found, at = [], 0
    reader = pa.ipc.MessageReader.open_stream(pa.py_buffer(body))
    for message in reader:
        assert body[at : at + 4] == CONTINUATION
        (length,) = struct.unpack_from("<I", body, at + 4)
        found.append((at + 8, at + 8 + length))
        at += 8 + length + (0 if message.body is None else message.body.size)
    return found


def with_column(table: pa.Table, name: str, column: pa.Array[Any]) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, column)


def spans_with(table: pa.Table, name: str, column: pa.Array[Any]) -> pa.Table:
    """Return the table with another column in its nested spans."""
    spans: Any = table["spans"].combine_chunks()
    chunk: Any = spans.chunk(0) if isinstance(spans, pa.ChunkedArray) else spans
    fields = chunk.values.type
    names = [fields.field(index).name for index in range(fields.num_fields)]
    parts = [column if each == name else chunk.values.field(each) for each in names]
    nested = pa.StructArray.from_arrays(parts, names=names)
    return with_column(table, "spans", pa.ListArray.from_arrays(chunk.offsets, nested))


@pytest.mark.slow
def test_a_stream_cut_short_anywhere_is_rejected(collector: Collector, run_id: str) -> None:
    body = of_table(cut_table(run_id))
    end_mark = len(body) - 8

    found = statuses(collector, (body[:end] for end in range(0, end_mark, 64)))

    # Cut after the schema, or after the dictionaries, it is a stream without cuts.
    assert set(found) <= REFUSED | {NOTHING}, Counter(found)
    assert found.count(NOTHING) <= 2
    assert_goes_on(collector, f"{run_id}-after")


def forged_headers(body: bytes) -> Iterator[bytes]:
    """Yield the body with each word of each header forged."""
    *others, rows = headers(body)
    for begin, end in [*others, rows]:
        for place in range(begin, end - 3, 4):
            # The other headers are many and alike: one forged value per word, in turn.
            values = FORGED if begin == rows[0] else FORGED[place // 4 % len(FORGED) :][:1]
            for value in values:
                broken = bytearray(body)
                struct.pack_into("<I", broken, place, value)
                yield bytes(broken)


def test_the_service_survives_forged_headers(collector: Collector, run_id: str) -> None:
    bodies = itertools.islice(forged_headers(of_table(cut_table(run_id))), 0, None, 40)

    found = Counter(statuses(collector, bodies))

    assert set(found) <= REFUSED | TAKEN | {NOTHING}, found
    assert found[422] > 20, found
    assert_goes_on(collector, f"{run_id}-after")


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_forged_size_of_a_compressed_buffer_is_rejected(
    collector: Collector, run_id: str, codec: Literal["lz4", "zstd"]
) -> None:
    body = of_table(cut_table(run_id, num_rows=400), codec=codec)
    magic = {"lz4": b"\x04\x22\x4d\x18", "zstd": b"\x28\xb5\x2f\xfd"}[codec]
    frames = [at for at in range(8, len(body)) if body.startswith(magic, at)]
    assert len(frames) > 5
    broken = []
    for at in frames:
        (true_size,) = struct.unpack_from("<q", body, at - 8)
        for size in (0, 1 << 31, (1 << 63) - 1, -2, true_size - 1, true_size + 1):
            mutant = bytearray(body)
            struct.pack_into("<q", mutant, at - 8, size)
            broken.append(bytes(mutant))
        mutant = bytearray(body)
        mutant[at : at + 4] = b"\0\0\0\0"  # not the start of a frame
        broken.append(bytes(mutant))

    found = Counter(statuses(collector, broken))

    assert set(found) <= REFUSED, found
    assert_goes_on(collector, f"{run_id}-after")


def coded(indices: Sequence[int]) -> pa.Array[Any]:
    """Return codes for a dictionary with one text, in range or not."""
    buffer = pa.py_buffer(struct.pack(f"<{len(indices)}i", *indices))
    codes = pa.Array.from_buffers(pa.int32(), len(indices), [None, buffer])
    return pa.DictionaryArray.from_arrays(codes, pa.array(["x"]), safe=False)


@pytest.mark.parametrize("code", [1, 1_000_000, -1])
def test_codes_outside_their_dictionary_are_rejected(
    collector: Collector, run_id: str, code: int
) -> None:
    broken = spans_with(cut_table(run_id), "name", coded([0] * 7 + [code]))

    assert statuses(collector, [of_table(broken)]) == [422]
    assert_goes_on(collector, f"{run_id}-after")


@pytest.mark.parametrize(
    "offsets",
    [(*range(8), 1 << 30), (*range(8), -1), (0, 8, 7, 6, 5, 4, 3, 2, 8), (-4, *range(1, 9))],
    ids=["beyond", "below", "falling", "before"],
)
def test_invalid_offsets_of_texts_are_rejected(
    collector: Collector, run_id: str, offsets: tuple[int, ...]
) -> None:
    body = of_table(spans_with(cut_table(run_id), "name", pa.array(list("abcdefgh"))))
    whole = struct.pack("<9i", *range(9))
    assert body.count(whole) == 1

    broken = body.replace(whole, struct.pack("<9i", *offsets))

    assert statuses(collector, [broken, body.replace(b"abcdefgh", b"\xff" * 8)]) == [422, 422]
    assert_goes_on(collector, f"{run_id}-after")


def nested(depth: int) -> pa.RecordBatch:
    column: pa.Array[Any] = pa.array([1])
    for _ in range(depth):
        column = pa.StructArray.from_arrays([column], names=["x"])
    return pa.RecordBatch.from_arrays([column], names=["spans"])


def test_streams_with_another_schema_are_rejected(collector: Collector, run_id: str) -> None:
    table = cut_table(run_id)
    marked = {b"rankscope.schema": b"1"}

    def body(of: pa.Table) -> bytes:
        return of_table(of.replace_schema_metadata(marked))

    deep = [
        stream(pa.RecordBatch.from_arrays(batch.columns, schema=batch.schema.with_metadata(marked)))
        for batch in (nested(depth) for depth in (2, 60))
    ]
    deep.append(nested(400).schema.with_metadata(marked).serialize().to_pybytes())
    nothing = pa.RecordBatch.from_arrays([], schema=pa.schema([]).with_metadata(marked))
    names = [*table.column_names, "run_id"]
    twice = pa.table([*table.columns, table["run_id"]], names=names)
    bodies = {
        "no columns": stream(nothing),
        "a column alone": body(table.select(["run_id"])),
        "a column twice": body(twice),
        "a number for a name": body(with_column(table, "run_id", pa.array([1]))),
        "a text for a list": body(with_column(table, "spans", pa.array(["x"]))),
        "nulls": body(with_column(table, "run_id", pa.array([None], pa.string()))),
        "a schema alone": stream(pa.RecordBatch.from_pylist([], schema=table.schema))[:-8],
        "no version": of_table(table.replace_schema_metadata(None)),
        **{f"nested {place}": each for place, each in enumerate(deep)},
        "a file, no stream": _file(table),
        "twice in one body": of_table(table) * 2,
    }
    found = dict(zip(bodies, statuses(collector, bodies.values()), strict=True))

    harmless = {"a schema alone", "twice in one body"}
    assert {found[name] for name in found.keys() - harmless} <= REFUSED, found
    assert {found[name] for name in harmless} <= TAKEN | {NOTHING}, found
    assert_goes_on(collector, f"{run_id}-after")


def test_a_reason_quotes_column_names_without_control_characters(
    collector: Collector, run_id: str
) -> None:
    named = pa.table([cut_table(run_id)["run_id"]], names=["spans"])
    field = pa.field("spans", pa.list_(pa.field("\x1b[2Jgone\u202e", pa.int64())))
    broken = pa.table(
        {"run_id": named["spans"], "spans": pa.array([[1]], field.type)},
        metadata={b"rankscope.schema": b"1"},
    )

    answer = collector.post("/v1/spans", of_table(broken))

    assert answer.status_code == 422
    reason = answer.json()["error"]
    assert "\\x1b[2Jgone\\u202e" in reason


def _file(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def test_replaced_dictionaries_are_not_mixed_up(
    store: Store, collector: Collector, run_id: str
) -> None:
    # GIVEN two cuts in two batches, the second with another dictionary for the same column
    first = pa.ipc.open_stream(encode_cuts([span_cut(run_id, 0, 3)])).read_all()
    second = pa.ipc.open_stream(encode_cuts([span_cut(run_id, 3, 6)])).read_all()
    renamed = spans_with(second, "name", pa.array(["later"] * 3).dictionary_encode())
    batches = [*first.to_batches(), *renamed.cast(first.schema).to_batches()]

    answer = collector.post("/v1/spans", stream(*batches))

    assert answer.status_code == 200, answer.text
    asked = "SELECT name FROM spans FINAL WHERE run_id = {run:String} ORDER BY row"
    names = [row["name"] for row in store.rows(asked, {"run": run_id})]
    assert names == ["s0", "s1", "s2", "later", "later", "later"]

"""`rankscope export`: every span once, in a file that other programs read."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankscope.collector.store.store import open_store
from rankscope.commands import export as module
from rankscope.commands.export import ExportFormat, export_spans
from rankscope.commands.simulate import simulate_run
from rankscope.errors import BadInputError
from rankscope.simulation import SimulateOptions
from rankscope.sources.chrome_trace import ChromeTrace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow

WHOLE = (None, None)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    url = f"chdb://{tmp_path_factory.mktemp('export')}/store"
    simulate_run(
        SimulateOptions(scenario="healthy", run_id="r", num_ranks=8, num_steps=5, store_url=url)
    )
    with open_store(url) as opened:
        yield opened


def export(
    store: Store,
    out: Path,
    form: str,
    *,
    steps: tuple[int | None, int | None] = WHOLE,
    ranks: tuple[int, ...] = (),
) -> int:
    return export_spans(
        store,
        "r",
        out,
        file_format=ExportFormat(form),
        steps=steps,
        ranks=[*ranks],
        show=lambda _: None,
    )


def stored(store: Store, where: str = "1") -> int:
    (row,) = store.rows(f"SELECT count() AS num FROM spans FINAL WHERE run_id = 'r' AND {where}")
    return int(row["num"])


@pytest.mark.parametrize("block_spans", [1, 700, 500_000])
def test_every_span_is_written_once_whatever_the_blocks(
    block_spans: int, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BLOCK_SPANS", block_spans)
    out = tmp_path / "r.parquet"

    num = export(store, out, "parquet")

    table = pq.read_table(out)
    keys = ["epoch", "rank", "track", "start_ns", "name", "depth"]
    assert num == table.num_rows == stored(store)
    assert table.select(keys).group_by(keys).aggregate([]).num_rows == num
    assert [path.name for path in tmp_path.iterdir()] == ["r.parquet"]


def test_a_trace_for_perfetto_has_a_process_per_rank_and_a_thread_per_track(
    store: Store, tmp_path: Path
) -> None:
    num = export(store, tmp_path / "r.json", "perfetto", steps=(1, 3), ranks=(0, 5))

    events = json.loads((tmp_path / "r.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(spans) == num == stored(store, "step >= 1 AND step <= 3 AND rank IN (0, 5)")
    assert names == {"rank 0", "rank 5"}
    assert {event["args"]["step"] for event in spans} == {1, 2, 3}
    assert 0 <= min(event["ts"] for event in spans) < 0.001
    assert {(event["pid"], event["tid"]) for event in spans} == {
        (event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"
    }


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_spans_of_a_thread_for_perfetto_are_inside_of_each_other_or_follow(num_blocks: int) -> None:
    """As Perfetto reads them: times are cut off to whole nanoseconds."""
    rng = np.random.default_rng(7)
    start_ns = 1_790_000_000_000_000_000 + np.sort(rng.integers(0, 10**9, 600))
    duration_ns = rng.integers(0, 10**7, 600)
    unknown = ("microbatch", "chunk", "seq", "src_rank", "dst_rank", "num_bytes")
    block = pa.table(
        {"start_ns": start_ns, "duration_ns": duration_ns, "rank": rng.integers(0, 12, 600)}
        | {"track": [*map(str, rng.integers(0, 2, 600))]}
        | {name: [-1] * 600 for name in unknown}
        | {name: [0] * 600 for name in ("step", "epoch", "group_id")}
        | {name: ["x"] * 600 for name in ("name", "kind")}
    )
    text: list[str] = []
    trace = ChromeTrace(text.append)

    for number in range(num_blocks):
        trace.add(block.filter(pa.array(np.arange(600) % num_blocks == number)))
    trace.end()

    written = json.loads("".join(text))["traceEvents"]
    named = [each for each in written if each["name"] == "process_name"]
    names = {each["pid"]: each["args"]["name"] for each in named}
    assert sorted(names, key=lambda rank: names[rank]) == [*range(12)]
    events = [each for each in written if each["ph"] == "X"]
    read = [(int(each["ts"] * 1000.0), int(each["dur"] * 1000.0)) for each in events]
    origin_ns = int(start_ns[0])
    assert sorted(read) == sorted(
        (int(start) - origin_ns, int(duration))
        for start, duration in zip(start_ns, duration_ns, strict=True)
    )
    ends: dict[tuple[int, int], list[int]] = {}
    for each, (begin, duration) in sorted(
        zip(events, read, strict=True), key=lambda pair: (pair[1][0], -pair[1][1])
    ):
        around = ends.setdefault((each["pid"], each["tid"]), [])
        while around and around[-1] <= begin:
            around.pop()
        assert not around or begin + duration <= around[-1]
        around.append(begin + duration)
    assert len(ends) < 120


def test_a_csv_has_one_row_per_span(store: Store, tmp_path: Path) -> None:
    num = export(store, tmp_path / "r.csv", "csv", steps=(2, 2))

    with (tmp_path / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == num == stored(store, "step = 2")
    assert {row["step"] for row in rows} == {"2"}


def test_no_text_of_a_csv_is_a_formula() -> None:
    texts = ["=1+1", "+x", "-x", "@x", "\tx", "forward", "a=b", "", "'x"]

    table = module._without_formulas(pa.table({"name": texts, "seq": [-1] * len(texts)}))

    assert table["name"].to_pylist() == [
        "'=1+1", "'+x", "'-x", "'@x", "'\tx", "forward", "a=b", "", "'x"
    ]  # fmt: skip
    assert table["seq"].to_pylist() == [-1] * len(texts)


def test_a_file_is_never_replaced_and_none_is_left_by_a_failure(
    store: Store, tmp_path: Path
) -> None:
    out = tmp_path / "r.csv"
    with pytest.raises(BadInputError, match="has no spans"):
        export(store, out, "csv", steps=(90, 99))
    assert list(tmp_path.iterdir()) == []
    out.write_text("mine")
    with pytest.raises(BadInputError, match="exists: give another --out"):
        export(store, out, "csv")
    assert out.read_text() == "mine"


@pytest.mark.parametrize("form", [*ExportFormat])
def test_no_link_beside_the_file_is_followed(store: Store, tmp_path: Path, form: str) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text("precious")
    (tmp_path / "out.part").symlink_to(victim)

    export(store, out, form)

    assert victim.read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.part", "victim"}


def test_a_link_to_no_file_is_not_replaced(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "r.csv"
    out.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(BadInputError, match="exists: give another --out"):
        export(store, out, "csv")

    assert [path.name for path in tmp_path.iterdir()] == ["r.csv"]

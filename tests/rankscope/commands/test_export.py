"""`rankscope export`: every span once, in a file that other programs read."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankscope.analysis.breakdown.mfu import read_mfu
from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.collector.store.store import open_store
from rankscope.commands import export as module
from rankscope.commands.export import ExportFormat, export_spans
from rankscope.commands.simulate import simulate_run
from rankscope.errors import BadInputError
from rankscope.server.around_runs import write_step_trace
from rankscope.simulation import SimulateOptions
from rankscope.sources.chrome_trace import ChromeTrace
from rankscope.sources.store_source import StoreSource

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
    run: str = "r",
    steps: tuple[int | None, int | None] = WHOLE,
    ranks: tuple[int, ...] = (),
) -> int:
    return export_spans(
        store, run, out, file_format=ExportFormat(form), steps=steps, ranks=[*ranks],
        show=lambda _: None,
    )  # fmt: skip


def stored(store: Store, where: str = "1") -> int:
    (row,) = store.rows(f"SELECT count() AS num FROM spans FINAL WHERE run_id = 'r' AND {where}")
    return int(row["num"])


@pytest.mark.parametrize("block_spans", [1, 700, 100_000])
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


def events_of(store: Store, out: Path, form: str, **chosen: Any) -> list[dict[str, Any]]:  # noqa: ANN401  # as export
    export(store, out, form, **chosen)
    events: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    return events


def is_span(event: dict[str, Any]) -> bool:
    return event["ph"] == "X" and bool(event["cat"] != "waiting")


def interval_ns(event: dict[str, Any]) -> tuple[int, int]:
    """Return begin and end as Perfetto reads them: cut off to whole nanoseconds."""
    begin = int(event["ts"] * 1000.0)
    return begin, begin + int(event.get("dur", 0) * 1000.0)


@pytest.mark.parametrize("form", ["perfetto", "chrome"])
def test_a_trace_has_a_process_per_rank_and_a_thread_per_track(
    form: str, store: Store, tmp_path: Path
) -> None:
    out = tmp_path / "r.json"

    num = export(store, out, form, steps=(1, 3), ranks=(0, 5))

    events = json.loads(out.read_text())["traceEvents"]
    spans = [event for event in events if is_span(event)]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert len(spans) == num == stored(store, "step >= 1 AND step <= 3 AND rank IN (0, 5)")
    assert {"rank 0", "rank 5"} == {name for name in names if name.startswith("rank")}
    assert {event["args"]["step"] for event in spans} == {1, 2, 3}
    assert 0 <= min(event["ts"] for event in spans) < 0.001
    assert {(event["pid"], event["tid"]) for event in spans} == {
        (event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"
    }


@pytest.mark.parametrize("block_spans", [1, 100_000])
def test_what_perfetto_shows_of_waiting_follows_from_the_spans_alone(
    block_spans: int, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits, transfers and arrows are computed again from the begins and ends in the file."""
    monkeypatch.setattr(module, "MAX_BLOCK_SPANS", block_spans)
    events = events_of(store, tmp_path / "r.json", "perfetto")
    spans = [event for event in events if is_span(event)]
    assert len(spans) == stored(store)
    instances: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for span in spans:
        args = span["args"]
        if "group" in args and span["cat"] != "wait":
            key = ("epoch", "group", "seq", "src_rank", "dst_rank")
            instances.setdefault(tuple(args.get(name) for name in key), []).append(span)
    waiting = {
        (event["pid"], event["tid"], interval_ns(event)[0]): event
        for event in events
        if event["ph"] == "X" and event["cat"] == "waiting"
    }
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(waiting) > 0
    arrows = {
        (starts[number]["pid"], starts[number]["tid"], end["pid"], end["tid"], interval_ns(end)[0])
        for number, end in ends.items()
        if starts[number]["ts"] == end["ts"]
    }
    assert len(arrows) == len(ends)

    num_waits = 0
    for members in instances.values():
        last = max(members, key=lambda span: (interval_ns(span)[0], -span["pid"]))
        arrival, _ = interval_ns(last)
        for span in members:
            begin, end = interval_ns(span)
            args = span["args"]
            assert args["wait_ns"] + args["transfer_ns"] == end - begin
            if end < arrival:  # a send that was buffered
                assert args["wait_ns"] == 0
                continue
            assert args["wait_ns"] == arrival - begin
            place = (span["pid"], span["tid"], begin)
            assert (place in waiting) == (args["wait_ns"] > 0)
            if place in waiting:
                num_waits += 1
                assert interval_ns(waiting[place]) == (begin, arrival)
                assert waiting[place]["name"] == f"waiting for rank {last['pid']}"
                assert (last["pid"], last["tid"], *place[:2], arrival) in arrows
    assert num_waits == len(waiting)


def test_slices_of_a_thread_are_in_order_and_inside_of_each_other(
    store: Store, tmp_path: Path
) -> None:
    around: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events_of(store, tmp_path / "r.json", "perfetto"):
        if event["ph"] != "X":
            continue
        begin, end = interval_ns(event)
        open_slices = around.setdefault((event["pid"], event["tid"]), [])
        while open_slices and open_slices[-1][1] <= begin:
            open_slices.pop()
        if open_slices:
            assert open_slices[-1][0] <= begin
            assert end <= open_slices[-1][1]
        open_slices.append((begin, end))


def waits_of(events: list[dict[str, Any]], ranks: tuple[int, ...]) -> list[tuple[Any, ...]]:
    return sorted(
        (event["pid"], event["name"], event["args"]["seq"], event["args"]["wait_ns"])
        for event in events
        if event["pid"] in ranks and "wait_ns" in event.get("args", {})
    )


def test_a_choice_of_ranks_changes_no_wait_and_leaves_no_arrow_without_an_end(
    store: Store, tmp_path: Path
) -> None:
    whole = events_of(store, tmp_path / "whole.json", "perfetto", steps=(1, 2))
    chosen = events_of(store, tmp_path / "some.json", "perfetto", steps=(1, 2), ranks=(0, 5))

    assert waits_of(chosen, (0, 5)) == waits_of(whole, (0, 5)) != []
    ends = [{each["id"] for each in chosen if each["ph"] == phase} for phase in "sf"]
    assert ends[0] == ends[1]
    assert {each["pid"] for each in chosen if each["ph"] in "sf"} <= {0, 5}


def test_a_step_that_a_page_saves_has_the_same_waits(store: Store, tmp_path: Path) -> None:
    whole = events_of(store, tmp_path / "whole.json", "perfetto", steps=(2, 2))

    saved = json.loads(write_step_trace(store, "r", epoch=0, step=2, ranks=(0, 5)))["traceEvents"]

    assert waits_of(saved, (0, 5)) == waits_of(whole, (0, 5)) != []


@pytest.mark.parametrize("block_spans", [1, 100_000])
def test_counters_are_the_mfu_of_each_step_and_the_samples_once(
    block_spans: int, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BLOCK_SPANS", block_spans)
    source = StoreSource(store)
    mfu = read_mfu(source, "r", source.steps("r"))
    assert mfu is not None

    events = events_of(store, tmp_path / "r.json", "perfetto")

    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    counters = [each for each in events if each["ph"] == "C"]
    by_step = [each for each in counters if each["name"] == "MFU"]
    assert {names[each["pid"]] for each in by_step} == {"job"}
    assert [each["args"]["value"] for each in by_step] == list(mfu.by_step.values())
    clocks = [each for each in counters if each["name"] == "gpu-clock-hz"]
    stored_values = store.rows(
        "SELECT value FROM samples FINAL"
        " WHERE name = 'gpu-clock-hz' AND at_ns >= (SELECT min(start_ns) FROM spans)"
    )
    assert sorted(each["args"]["value"] for each in clocks) == sorted(
        row["value"] for row in stored_values
    )
    assert {names[each["pid"]] for each in clocks} == {f"rank {rank}" for rank in range(8)}
    assert len({(each["pid"], each["name"], each["ts"]) for each in counters}) == len(counters)
    assert min(each["ts"] for each in counters) >= 0


def test_a_chrome_trace_has_the_spans_alone(store: Store, tmp_path: Path) -> None:
    events = events_of(store, tmp_path / "r.json", "chrome", steps=(1, 1))

    assert {event["ph"] for event in events} == {"M", "X"}
    assert not [event for event in events if "wait_ns" in event["args"]]


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
    missing = "no spans in steps 90:99 of ranks 3: it has steps 0 to 4 and ranks 0, 1, 2, 3, 4, 5"
    with pytest.raises(BadInputError, match=missing):
        export(store, out, "csv", steps=(90, 99), ranks=(3,))
    assert list(tmp_path.iterdir()) == []
    out.write_text("mine")
    link = tmp_path / "link.csv"
    link.symlink_to(tmp_path / "elsewhere")
    for there in (out, link):
        with pytest.raises(BadInputError, match="exists: give another --out"):
            export(store, there, "csv")
    assert out.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"r.csv", "link.csv"}


def test_a_run_that_is_not_there_and_a_folder_that_is_not_are_said_in_words(
    store: Store, tmp_path: Path
) -> None:
    out = tmp_path / "folder" / "r"
    with pytest.raises(BadInputError, match=r"can't be written \(No such file.*\): give"):
        export(store, out, "csv")
    with pytest.raises(UnknownRunError, match="no run 'nope'"):
        export(store, out, "csv", run="nope")
    assert list(tmp_path.iterdir()) == []


def test_no_link_beside_the_file_is_followed(store: Store, tmp_path: Path) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.write_text("precious")
    (tmp_path / "out.part").symlink_to(victim)

    export(store, out, "csv")

    assert victim.read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.part", "victim"}

"""Chrome traces of training frameworks: what is found in one, what is derived, what is refused."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.collector.errors import TraceError
from rankscope.collector.importers.chrome import read_events
from rankscope.collector.store.store import open_store
from rankscope.commands.import_trace import import_files
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.span import NONE, SpanFlag, SpanKind, pack_kinds
from tests.support.collector.chrome_builder import PipelineJob

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.importers.spool_folder import Process, Record

Event = dict[str, Any]


def read(folder: Path, events: object) -> list[Process]:
    path = folder / "trace.json"
    path.write_text(json.dumps(events))
    return list(read_events([path], "run"))


def event(
    name: str, begin: int, end: int, *, rank: int = 0, step: int = 0, **args: object
) -> Event:
    """Return a complete event of times in us."""
    return {
        "name": name, "ph": "X", "ts": begin, "dur": end - begin, "pid": rank, "tid": 0,
        "args": {"step": step, **args},
    }  # fmt: skip


def spans(process: Process, kind: SpanKind | None, origin_ns: int) -> list[tuple[float, ...]]:
    """Return begin and end of the spans of a kind, us."""
    return [
        ((each.start_ns - origin_ns) / 1000, (each.end_ns - origin_ns) / 1000)
        for each in process.records
        if each.kind is kind
    ]


def of_kind(process: Process, *kinds: SpanKind | None) -> list[Record]:
    return [each for each in process.records if each.kind in kinds]


def diagnose(folder: Path, events: list[Event]) -> RunReport:
    path, url = folder / "trace.json", f"chdb://{folder}/store"
    path.write_text(json.dumps(events))
    import_files([path], file_format="chrome", run_id="run", store_url=url)
    with open_store(url) as store:
        return analyze_run(StoreSource(store), "run")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["only_passes", "megascan"])
def test_the_rank_that_computes_longer_is_named_and_priced_in_each_form(
    form: str, tmp_path: Path
) -> None:
    """A step of the builder takes 264 ms, and 228 ms if all stages compute 10 ms."""
    report = diagnose(tmp_path, getattr(PipelineJob(forward_ms={2: 14.0}), form)())

    top = report.findings[0]
    assert (top.cause, top.ranks) == ("slow-compute", (2,))
    assert top.saved_s == pytest.approx(0.036, rel=0.03)


@pytest.mark.slow
def test_a_replica_waits_in_its_gradients_for_the_slow_one(tmp_path: Path) -> None:
    """A step of the builder takes 240 ms, and 228 ms if all ranks compute 10 ms."""
    report = diagnose(tmp_path, PipelineJob(num_replicas=4, forward_ms={2: 14.0}).ndtimeline())

    top = report.findings[0]
    assert (top.cause, top.ranks) == ("slow-compute", (2,))
    assert top.saved_s == pytest.approx(0.012, rel=0.05)


@pytest.mark.slow
def test_a_last_stage_with_more_work_is_named_without_any_communication(tmp_path: Path) -> None:
    """As in MegaScan's public trace, which has forwards and backwards alone."""
    events = PipelineJob(forward_ms={3: 20.0}, num_microbatches=8).only_passes()

    report = diagnose(tmp_path, events)

    assert (report.findings[0].cause, report.findings[0].ranks) == ("stage-imbalance", (3,))
    assert not [each for each in report.findings if each.cause in ("gc-pause", "data-stall")]


def test_a_begin_and_its_end_are_one_span_with_the_arguments_of_both(tmp_path: Path) -> None:
    events = [
        {"name": "forward", "ph": "B", "ts": 1, "pid": 0, "tid": 0, "args": {"iteration": 7}},
        {"name": "decoder", "ph": "B", "ts": 2, "pid": 0, "tid": 0, "args": {"iteration": 7}},
        {"name": "decoder", "ph": "E", "ts": 5, "pid": 0, "tid": 0},
        {"ph": "E", "ts": 9, "pid": 0, "tid": 0,
         "args": {"microbatch": 3, "model_chunk": 1, "pp_rank": 0}},
        {"name": "never ends", "ph": "B", "ts": 9, "pid": 0, "tid": 0, "args": {"iteration": 7}},
        {"name": "iteration begin", "ph": "i", "ts": 0, "pid": 0, "args": {"iteration": 7}},
        {"name": "iteration end", "ph": "i", "ts": 11, "pid": 0, "args": {"iteration": 7}},
    ]  # fmt: skip

    (process,) = read(tmp_path, {"traceEvents": events})

    (forward,) = of_kind(process, SpanKind.FORWARD)
    origin_ns = forward.start_ns - 1000
    assert (forward.step, forward.microbatch, forward.chunk, forward.depth) == (7, 3, 1, 0)
    assert spans(process, SpanKind.FORWARD, origin_ns) == [(1, 9)]
    assert spans(process, None, origin_ns) == [(0, 11)]
    assert [(each.name, each.depth) for each in of_kind(process, SpanKind.OTHER)] == [
        ("decoder", 1)
    ]


def test_a_step_is_named_by_an_interval_around_its_events(tmp_path: Path) -> None:
    """As Composer does, whose backward of a batch follows its forward."""
    events = [
        {"name": "event/batch", "ph": "X", "ts": 10 * step, "dur": 9, "pid": 0, "tid": 1}
        for step in range(3)
    ] + [
        {"name": f"event/{name}", "ph": "X", "ts": 10 * step + at, "dur": 3, "pid": 0, "tid": 1}
        for step in range(3)
        for at, name in ((1, "forward"), (5, "backward"))
    ]

    (process,) = read(tmp_path, events)

    assert [(each.step, each.microbatch) for each in of_kind(process, SpanKind.FORWARD)] == [
        (0, 0), (1, 0), (2, 0)
    ]  # fmt: skip
    assert [each.step for each in process.records if each.kind is None] == [0, 1, 2]


def test_an_overlap_by_the_precision_of_unix_times_is_none(tmp_path: Path) -> None:
    """A float of 1.79e15 us is a multiple of a quarter."""
    begin = 1_790_000_000_000_000.0
    events = [event("forward", 0, 5), event("forward", 0, 5)]
    events[0] |= {"ts": begin, "dur": 100.6}
    events[1] |= {"ts": begin + 100.25, "dur": 50}

    (process,) = read(tmp_path, events)

    first, second = of_kind(process, SpanKind.FORWARD)
    assert first.end_ns == second.start_ns
    assert (first.depth, second.depth) == (0, 0)
    assert (first.microbatch, second.microbatch) == (0, 1)


def test_times_from_an_origin_of_their_own_end_when_the_file_was_written(tmp_path: Path) -> None:
    (process,) = read(tmp_path, [event("forward", 0, 40), event("backward", 40, 100)])

    ends = [each.end_ns for each in of_kind(process, SpanKind.BACKWARD)]
    assert ends == [(tmp_path / "trace.json").stat().st_mtime_ns]


def test_unix_times_stay_as_they_are_and_files_of_several_hosts_are_joined(tmp_path: Path) -> None:
    for rank in range(2):
        begin = 1_790_000_000_000_000
        own = [event("forward", begin, begin + 9, rank=rank, pp=0, tp=rank)]
        (tmp_path / f"trace_step0_{rank}").write_bytes(gzip.compress(json.dumps(own).encode()))

    processes = list(read_events(sorted(tmp_path.iterdir()), "run"))

    assert [each.rank for each in processes] == [0, 1]
    assert processes[0].manifest["layout"]["tp"] == 2
    assert of_kind(processes[1], SpanKind.FORWARD)[0].start_ns == 1_790_000_000_000_000_000


def test_a_pass_waits_for_the_one_that_it_needs_if_no_transfer_is_recorded(tmp_path: Path) -> None:
    """Stage 1 is free at 0 and gets its input after 10; the transfer takes 2 on this link."""
    events = [
        event("forward", 0, 10, rank=0, pp=0, microbatch=0),
        event("forward", 10, 20, rank=0, pp=0, microbatch=1),
        event("forward", 12, 22, rank=1, pp=1, microbatch=0),
        event("forward", 24, 34, rank=1, pp=1, microbatch=1),
        event("backward", 34, 50, rank=1, pp=1, microbatch=0),
        event("backward", 52, 60, rank=0, pp=0, microbatch=0),
    ]

    first, last = read(tmp_path, events)

    origin_ns = of_kind(first, SpanKind.FORWARD)[0].start_ns
    assert spans(last, SpanKind.PP_RECV, origin_ns) == [(0, 12), (22, 24)]
    assert spans(first, SpanKind.PP_SEND, origin_ns) == [(10, 12), (20, 24)]
    assert spans(first, SpanKind.PP_RECV, origin_ns) == [(20, 52)]
    received, sent = of_kind(last, SpanKind.PP_RECV), of_kind(first, SpanKind.PP_SEND)
    for receive, send in zip(received, sent, strict=True):
        assert receive.comm is not None
        assert send.comm == receive.comm._replace(kind=SpanKind.PP_SEND)
    assert sent[0].flags & SpanFlag.ASYNC
    assert not received[0].flags & SpanFlag.ASYNC


def test_idle_time_beyond_the_usual_transfer_is_left_to_the_host(tmp_path: Path) -> None:
    events = []
    for step in range(5):
        begin, late = 100 * step, 30 if step == 3 else 0
        events += [
            event("forward", begin, begin + 10, rank=0, step=step, pp=0),
            event("forward", begin + 12 + late, begin + 50, rank=1, step=step, pp=1),
        ]

    _, last = read(tmp_path, events)

    received = spans(last, SpanKind.PP_RECV, of_kind(last, SpanKind.FORWARD)[0].start_ns - 12_000)
    assert [end for _, end in received] == [12, 112, 212, 312, 412]


def test_a_transfer_without_a_wait_does_not_show_how_long_it_took(tmp_path: Path) -> None:
    """Stage 1 waits for the first of three micro-batches alone: its transfer takes 4."""
    begins = {0: [0, 10, 20], 1: [14, 34, 54]}
    events = [
        event("forward", begin, begin + (20 if rank else 10), rank=rank, pp=rank, microbatch=number)
        for rank, own in begins.items()
        for number, begin in enumerate(own)
    ]
    events += [
        event("forward", 100, 110, rank=0, step=1, pp=0, microbatch=0),
        event("forward", 115, 130, rank=1, step=1, pp=1, microbatch=0),
        event("forward", 200, 210, rank=0, step=2, pp=0, microbatch=0),
        event("forward", 214, 230, rank=1, step=2, pp=1, microbatch=0),
    ]

    _, last = read(tmp_path, events)

    received = spans(last, SpanKind.PP_RECV, of_kind(last, SpanKind.FORWARD)[0].start_ns - 14_000)
    assert [end for _, end in received] == [14, 34, 54, 114, 214]
    # Ends that a stage waited for are known, the others are bounds.
    bounds = [bool(each.flags & SpanFlag.END_BOUND) for each in of_kind(last, SpanKind.PP_RECV)]
    assert bounds == [False, True, True, False, False]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_stage_that_exchanges_waits_for_the_one_that_receives_from_it(
    tmp_path: Path,
    exchanges: bool,  # noqa: FBT001
) -> None:
    """Stage 1 computes 10, stage 0 computes 2; transfers take no time.

    Stage 1 receives an input when it has ended the forward before. So the second forward of stage 0
    is sent when stage 1 has ended its first one, at 12, and only then the third one begins.
    """
    begins = {0: [0, 2, 12, 22] if exchanges else [0, 2, 4, 6], 1: [2, 12, 22, 32]}
    events = [
        event("forward", begin, begin + (10 if rank else 2), rank=rank, pp=rank, microbatch=number)
        for rank, own in begins.items()
        for number, begin in enumerate(own)
    ]

    first, last = read(tmp_path, events)

    origin_ns = of_kind(first, SpanKind.FORWARD)[0].start_ns
    waits = spans(first, SpanKind.WAIT, origin_ns)
    assert waits == ([(4, 12), (14, 22)] if exchanges else [])
    if exchanges:
        sent = [each.comm for each in of_kind(first, SpanKind.PP_SEND)]
        assert [each.comm for each in of_kind(first, SpanKind.WAIT)] == sent[1:3]
        assert spans(last, SpanKind.PP_RECV, origin_ns) == [(0, 2), (12, 12), (22, 22), (32, 32)]
        assert spans(last, SpanKind.WAIT, origin_ns) == [(0, 2)]


def test_the_next_model_chunk_on_the_first_stage_needs_the_last_stage(tmp_path: Path) -> None:
    events = [
        event("forward", 10 * place, 10 * place + 9, rank=place % 2, pp=place % 2, microbatch=0,
              model_chunk=place // 2)
        for place in range(4)
    ]  # fmt: skip

    processes = read(tmp_path, events)

    first, last = (
        [(each.comm.src_rank, each.chunk) for each in of_kind(own, SpanKind.PP_RECV) if each.comm]
        for own in processes
    )
    assert first == [(1, 1)]
    assert last == [(0, 0), (0, 1)]


def test_nothing_is_derived_if_chunks_are_in_another_order(tmp_path: Path) -> None:
    """A schedule in V form: the second chunk begins on the last stage."""
    events = [
        event("forward", 10 * place, 10 * place + 9, rank=stage, pp=stage, microbatch=0,
              model_chunk=chunk)
        for place, (stage, chunk) in enumerate(((0, 0), (1, 0), (1, 1), (0, 1)))
    ]  # fmt: skip

    processes = read(tmp_path, events)

    assert not [
        of_kind(each, SpanKind.PP_RECV)[0] for each in processes if of_kind(each, SpanKind.PP_RECV)
    ]


def test_replicas_go_on_together_if_no_gradients_are_recorded(tmp_path: Path) -> None:
    """Rank 1 ends its passes last; no rank goes on before."""
    events = [
        event(name, 100 * step + begin, 100 * step + end, rank=rank, step=step, pp=0, dp=rank)
        for step in range(3)
        for rank, name, begin, end in (
            (0, "forward", 0, 10), (0, "backward", 10, 30),
            (1, "forward", 0, 20), (1, "backward", 20, 60),
        )
    ]  # fmt: skip

    first, last = read(tmp_path, events)

    origin_ns = of_kind(first, SpanKind.FORWARD)[0].start_ns
    assert spans(first, SpanKind.DP_COMM, origin_ns) == [(30, 60), (130, 160), (230, 260)]
    assert spans(last, SpanKind.DP_COMM, origin_ns) == [(60, 60), (160, 160), (260, 260)]
    assert [each.comm for each in of_kind(first, SpanKind.DP_COMM)] == [
        each.comm for each in of_kind(last, SpanKind.DP_COMM)
    ]
    assert all(each.flags & SpanFlag.END_BOUND for each in of_kind(last, SpanKind.DP_COMM))
    assert {each.left_out for each in first.records} == {0}


def test_replicas_that_go_on_alone_are_not_synchronised_and_lack_that_kind(tmp_path: Path) -> None:
    events = [
        event("backward", begin, begin + 9, rank=rank, step=step, pp=0, dp=rank)
        for step in range(3)
        for rank, begin in ((0, 10 * step), (1, 50 * step))
    ]

    first, _ = read(tmp_path, events)

    assert not of_kind(first, SpanKind.DP_COMM)
    assert {each.left_out for each in of_kind(first, None)} == {pack_kinds([SpanKind.DP_COMM])}


@pytest.mark.slow
def test_ranks_without_any_communication_are_no_evidence(tmp_path: Path) -> None:
    """Rank 1 computes longer, and rank 0 waits for it inside of its backward."""
    events = [
        event(name, 100 * step + begin, 100 * step + end, rank=rank, step=step)
        for step in range(8)
        for rank, name, begin, end in (
            (0, "forward", 0, 10), (0, "backward", 10, 90),
            (1, "forward", 0, 30), (1, "backward", 30, 90),
        )
    ]  # fmt: skip

    report = diagnose(tmp_path, events)

    assert [each.cause for each in report.findings] == ["insufficient-evidence"]


def test_a_call_of_the_schedule_is_the_transfers_that_it_makes(tmp_path: Path) -> None:
    """An exchange sends and receives in one call; at the first stage a receive is none."""
    passes = [
        event("forward", 0, 5, rank=rank, dp_rk=0, pp_rk=rank, tp_rk=0, g_rk=rank)
        for rank in range(2)
    ]
    place = {"dp_rk": 0, "tp_rk": 0}
    calls = [
        event("recv-warmup", 5, 6, rank=0, pp_rk=0, g_rk=0, group=None, **place),
        event("exchange-next", 6, 30, rank=0, pp_rk=0, g_rk=0, group=[0, 1], data=64, **place),
        event("exchange-prev", 8, 30, rank=1, pp_rk=1, g_rk=1, group=[0, 1], data=64, **place),
    ]

    first, last = read(tmp_path, passes + calls)

    sends, receives = of_kind(first, SpanKind.PP_SEND), of_kind(first, SpanKind.PP_RECV)
    assert [each.name for each in sends + receives] == ["exchange-next", "exchange-next"]
    assert sends[0].flags & SpanFlag.COALESCED
    assert sends[0].interval_id == receives[0].interval_id > 0
    ends = {(each.kind, each.comm) for each in of_kind(last, SpanKind.PP_SEND, SpanKind.PP_RECV)}
    for own, other in ((sends[0], SpanKind.PP_RECV), (receives[0], SpanKind.PP_SEND)):
        assert own.comm is not None
        assert (other, own.comm._replace(kind=other)) in ends


def test_the_group_of_a_tensor_parallel_collective_follows_from_the_positions(
    tmp_path: Path,
) -> None:
    """MegaScan names the ranks of all replicas as the group of its all-reduce."""
    events = []
    for rank in range(4):
        place = {"dp_rk": rank // 2, "pp_rk": 0, "tp_rk": rank % 2, "g_rk": rank}
        events += [
            event("forward", 0, 9, rank=rank, **place),
            event("_reduce", 3, 5, rank=rank, group=[0, 1, 2, 3], **place),
            event("allreduce", 9, 12, rank=rank, **place),
        ]

    processes = read(tmp_path, events)

    members: dict[str, set[tuple[int, ...]]] = {"tp-comm": set(), "dp-comm": set()}
    for kind, _, own in processes[0].groups.values():
        members[kind].add(own)
    assert members == {"tp-comm": {(0, 1), (2, 3)}, "dp-comm": {(0, 2), (1, 3)}}
    (reduced,) = of_kind(processes[3], SpanKind.TP_COMM)
    assert reduced.depth == 1
    assert not reduced.flags & SpanFlag.ASYNC


def test_a_collective_that_no_table_has_needs_its_members(tmp_path: Path) -> None:
    events = [event("forward", 0, 9, rank=rank) for rank in range(2)]
    reduces = [event("my_all_reduce", 9, 12, rank=rank, group="0 1") for rank in range(2)]

    first, _ = read(tmp_path, events + reduces)

    assert [each.kind for each in of_kind(first, SpanKind.DP_COMM)] == [SpanKind.DP_COMM]


def test_the_last_communications_of_a_step_match_if_the_first_is_missing(tmp_path: Path) -> None:
    """ndtimeline has no stream to record before a job's first communication."""
    path = tmp_path / "trace_step0_1"
    path.write_text(json.dumps(PipelineJob(num_stages=2, num_steps=2).ndtimeline()))

    first, last = read_events([path], "run")

    def comms(process: Process, kind: SpanKind, step: int) -> set[tuple[int, ...]]:
        return {
            (each.comm.group_id, each.comm.src_rank, each.comm.dst_rank, each.comm.seq)
            for each in of_kind(process, kind)
            if each.comm and each.step == step
        }

    for step in range(2):
        sent = comms(first, SpanKind.PP_SEND, step)
        received = comms(last, SpanKind.PP_RECV, step)
        assert sent
        assert sent == received if step else sent & received
    assert all(each.flags & SpanFlag.ASYNC for each in of_kind(first, SpanKind.PP_SEND))
    assert all(each.launch_ns == NONE for each in of_kind(first, SpanKind.PP_SEND))


PASS = event("forward", 0, 5)
REFUSED: dict[str, tuple[object, str]] = {
    "no list": ({"traceEvents": None}, "no list of events"),
    "a number": (7, "no list of events"),
    "an operator": ([{**PASS, "cat": "cpu_op"}], "--format kineto"),
    "a file of one rank": ([{"name": "forward", "ph": "B", "rel_ts": 5}], "aggregate.py"),
    "no pass": ([event("draw", 0, 5), event("parse", 5, 6)], "draw, parse"),
    "no step": ([{**PASS, "args": {}}], "args.step"),
    "no rank": ([{**PASS, "pid": "worker"}], "args.rank"),
    "a missing rank": ([PASS, {**PASS, "pid": 2}], "rank 1"),
    "a missing stage": ([{**PASS, "args": {"step": 0, "pp": 3}}], "rank 1, 2, 3"),
    "two positions": (
        [{**PASS, "args": {"step": 0, "pp": stage}} for stage in range(2)], "args.rank"
    ),
    "two runs": ([PASS, event("forward", 3, 8)], "overlap on rank 0"),
    "two ranks of one pid": ([PASS, {**event("forward", 3, 8), "tid": 1}], "args.rank"),
    "an unknown group": ([PASS, event("nccl:all_gather", 5, 6)], "args.group"),
    "an unknown other end": ([PASS, event("send-forward", 5, 6)], "args.group"),
    "members that are not there": ([PASS, event("all-reduce", 5, 6, group=[0, 9])], "args.group"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_trace_without_what_is_needed_is_refused_in_words(case: str, tmp_path: Path) -> None:
    events, missing = REFUSED[case]

    with pytest.raises(TraceError) as refusal:
        read(tmp_path, events)

    assert missing in str(refusal.value)
    assert str(tmp_path / "trace.json") in str(refusal.value)


@pytest.mark.parametrize("text", ["", "{", "[" * 50_000, "\0", "9" * 50_000])
def test_no_text_raises_anything_else(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)

    with pytest.raises(TraceError):
        list(read_events([path], "run"))


def test_several_files_need_a_common_time(tmp_path: Path) -> None:
    paths = [tmp_path / f"{rank}.json" for rank in range(2)]
    for rank, path in enumerate(paths):
        path.write_text(json.dumps([{**PASS, "pid": rank}]))

    with pytest.raises(TraceError, match="origin of its own"):
        list(read_events(paths, "run"))


@pytest.mark.parametrize("value", [None, "x", -1, 1e40, [], {}, True, 1.5])
@pytest.mark.parametrize("key", ["ts", "dur", "pid", "tid", "name", "args", "ph", "cat", "id"])
def test_events_with_other_values_are_left_out_or_refused(
    key: str, value: object, tmp_path: Path
) -> None:
    events = [event("forward", 0, 5), event("backward", 5, 9), {**PASS, key: value}]

    try:
        (process,) = read(tmp_path, events)
    except TraceError:
        return
    assert len(of_kind(process, SpanKind.FORWARD, SpanKind.OTHER)) <= 2

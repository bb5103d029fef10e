"""Traces of `torch.profiler`: what is found in one, and what a job's traces say together."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.report.report import Severity
from rankscope.collector.errors import TraceError
from rankscope.collector.importers.event_stream import PIECE_BYTES
from rankscope.collector.importers.kineto import read_traces
from rankscope.collector.importers.kineto_comm import CommKernels
from rankscope.collector.store.store import open_store
from rankscope.commands.import_trace import import_files
from rankscope.errors import BadInputError
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.span import NONE, NS_PER_MS, IdleName, SpanFlag, SpanKind
from tests.support.collector.kineto_builder import AUTOGRAD, BASE_NS, TraceBuilder
from tests.support.paths import ROOT
from tests.support.trainer.job import trainer_environment

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.importers.spool_folder import Process, Record

ON_DEVICE = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN


def read_one(trace: TraceBuilder, folder: Path) -> Process:
    (process,) = read_traces([trace.write(folder)], "run")
    return process


def spans(process: Process, kind: SpanKind | None) -> list[tuple[float, float]]:
    """Return begin and end of the spans of a kind, in ms from the trace's begin."""
    return [
        ((each.start_ns - BASE_NS) / NS_PER_MS, (each.end_ns - BASE_NS) / NS_PER_MS)
        for each in process.records
        if each.kind is kind
    ]


def of_kind(process: Process, kind: SpanKind) -> list[Record]:
    return [each for each in process.records if each.kind is kind]


def stepped(num_ranks: int = 2, **options: Any) -> TraceBuilder:  # noqa: ANN401
    """Return the trace of rank 0, with one step of 100 ms."""
    trace = TraceBuilder(0, num_ranks, **options)
    trace.step(0, 0, 100)
    return trace


def one_step() -> TraceBuilder:
    trace = TraceBuilder(0, 2)
    trace.step(5, 0, 100)
    add_step(trace, 10, reduced=60)
    return trace


def add_step(trace: TraceBuilder, begin: float, *, reduced: float, slow: float = 1.0) -> None:
    """Add two kernels forward, two backward, an all-reduce, and the optimizer.

    Args:
        trace: The rank's trace.
        begin: Begin of the first kernel.
        reduced: End of the all-reduce.
        slow: Factor of the forward.
    """
    at = begin
    for name in ("gemm", "gelu"):
        trace.kernel(name, at, at + 10 * slow)
        at += 10 * slow
    trace.backward(at - 2, at + 30)
    for name in ("gemm_backward", "gelu_backward"):
        trace.kernel(name, at, at + 10, tid=AUTOGRAD)
        at += 10
    trace.comm("allreduce", at, reduced, launch=at - 1)
    trace.add("Optimizer.step#AdamW.step", "user_annotation", at, at + 5, tid=100)
    trace.kernel("adam", reduced + 0.005, reduced + 3, launch=at + 1)


def test_kernels_are_spans_of_the_phase_that_launched_them(tmp_path: Path) -> None:
    process = read_one(one_step(), tmp_path)

    assert spans(process, None) == [(0.0, 100.0)]
    assert spans(process, SpanKind.FORWARD) == [(10.0, 30.0)]
    assert spans(process, SpanKind.BACKWARD) == [(30.0, 50.0)]
    assert spans(process, SpanKind.OPTIMIZER) == [(60.005, 63.0)]
    forward = of_kind(process, SpanKind.FORWARD)[0]
    assert (forward.step, forward.flags) == (5, ON_DEVICE)
    assert (forward.launch_ns - BASE_NS) / NS_PER_MS == 9.0
    assert (process.host, process.manifest["device"]["name"]) == ("host-0", "NVIDIA H100 80GB HBM3")


def test_a_kernel_that_begins_as_a_communication_ends_waited_for_it(tmp_path: Path) -> None:
    process = read_one(one_step(), tmp_path)
    wait, comm = of_kind(process, SpanKind.WAIT)[0], of_kind(process, SpanKind.DP_COMM)[0]

    assert spans(process, SpanKind.WAIT) == [(50.0, 60.0)]
    assert wait.comm == comm.comm
    assert comm.flags == ON_DEVICE | SpanFlag.ASYNC
    assert comm.comm is not None
    assert comm.comm.num_bytes == 2000


@pytest.mark.parametrize(("begin", "launch"), [(60.1, 51.0), (60.005, 60.001)])
def test_a_kernel_that_begins_later_or_was_launched_later_did_not_wait(
    tmp_path: Path, begin: float, launch: float
) -> None:
    trace = stepped()
    trace.kernel("gemm", 10, 50)
    trace.comm("allreduce", 50, 60, launch=49)
    trace.kernel("adam", begin, 70, launch=launch)

    assert spans(read_one(trace, tmp_path), SpanKind.WAIT) == []


def test_a_wait_inside_of_a_run_of_kernels_is_nested_in_its_span(tmp_path: Path) -> None:
    trace = stepped()
    trace.kernel("gemm", 10, 20)
    trace.comm("allreduce", 20, 30, launch=12)
    trace.kernel("gelu", 30.004, 40, launch=13)
    process = read_one(trace, tmp_path)

    assert spans(process, SpanKind.FORWARD) == [(10.0, 40.0)]
    assert spans(process, SpanKind.WAIT) == [(20.0, 30.0)]
    assert of_kind(process, SpanKind.WAIT)[0].depth == 1


def test_the_time_in_which_a_host_was_late_is_no_compute(tmp_path: Path) -> None:
    trace = stepped()
    trace.kernel("gemm", 10, 20)
    trace.kernel("gelu", 50, 60, launch=49.9)
    process = read_one(trace, tmp_path)

    assert spans(process, SpanKind.FORWARD) == [(10.0, 60.0)]
    assert spans(process, SpanKind.HOST) == [(20.0, 50.0)]
    (idle,) = of_kind(process, SpanKind.HOST)
    assert (idle.name, idle.depth, idle.flags) == (IdleName.LATE, 1, ON_DEVICE)


def test_what_was_launched_after_the_last_backward_belongs_to_the_optimizer(tmp_path: Path) -> None:
    trace = one_step()
    trace.kernel("clip", 51, 52, launch=45)
    process = read_one(trace, tmp_path)

    assert spans(process, SpanKind.OPTIMIZER) == [(51.0, 63.0)]
    assert spans(process, SpanKind.FORWARD) == [(10.0, 30.0)]


def test_each_forward_after_a_backward_is_another_micro_batch(tmp_path: Path) -> None:
    trace = stepped()
    for begin in (10, 30):
        trace.kernel("gemm", begin, begin + 10)
        trace.backward(begin + 8, begin + 18)
        trace.kernel("gemm_backward", begin + 10, begin + 20, tid=AUTOGRAD, launch=begin + 9)
    process = read_one(trace, tmp_path)

    assert [each.microbatch for each in of_kind(process, SpanKind.FORWARD)] == [0, 1]
    assert [each.microbatch for each in of_kind(process, SpanKind.BACKWARD)] == [0, 1]


def test_communication_without_a_number_is_counted_in_each_step(tmp_path: Path) -> None:
    trace = TraceBuilder(0, 2)
    for step, begin in ((7, 0), (8, 100)):
        trace.step(step, begin, begin + 100)
        trace.comm("allreduce", begin + 10, begin + 20)
        trace.comm("allgather", begin + 20, begin + 30)
    trace.comm("allreduce", 205, 210, launch=204)  # after the last step
    process = read_one(trace, tmp_path)

    seqs = [each.comm.seq for each in of_kind(process, SpanKind.DP_COMM) if each.comm]
    assert seqs == [7 << 24, (7 << 24) + 1, 8 << 24, (8 << 24) + 1]


def test_the_recorded_number_of_a_collective_is_kept(tmp_path: Path) -> None:
    trace = stepped()
    trace.comm("allreduce", 10, 20, Seq=41)
    process = read_one(trace, tmp_path)

    assert [each.comm.seq for each in of_kind(process, SpanKind.DP_COMM) if each.comm] == [41]


def with_send(folder: Path, rank: int) -> Path:
    """Write a trace of rank 1 or 3 of four, with a transfer from rank 1 to 3."""
    groups = {"0": ("default_pg", (0, 1, 2, 3)), "3": ("mesh_pp", (1, 3))}
    trace = TraceBuilder(rank, 4, groups=groups)
    trace.step(0, 0, 100)
    ends: dict[str, Any] = {"Src Rank": 0, "Dst Rank": 1}
    trace.comm("send", 10, 20, group="3", **ends)
    return trace.write(folder)


def test_sends_and_receives_have_the_global_ranks_of_their_ends(tmp_path: Path) -> None:
    first, last = read_traces([with_send(tmp_path, rank) for rank in (1, 3)], "run")
    (sent,) = of_kind(first, SpanKind.PP_SEND)
    (received,) = of_kind(last, SpanKind.PP_RECV)

    assert sent.comm is not None
    assert received.comm is not None
    assert (sent.comm.src_rank, sent.comm.dst_rank) == (1, 3)
    assert (received.comm.group_id, received.comm.src_rank) == (sent.comm.group_id, 1)


def test_a_transfer_with_a_rank_without_a_file_is_of_this_rank_alone(tmp_path: Path) -> None:
    (process,) = read_traces([with_send(tmp_path, 1)], "run")
    (sent,) = of_kind(process, SpanKind.OTHER)

    assert sent.comm is not None
    assert (sent.comm.src_rank, sent.comm.dst_rank) == (NONE, NONE)
    assert process.groups[sent.comm.group_id] == ("other", "pp", (1,))
    assert sent.flags & SpanFlag.END_BOUND


@pytest.mark.parametrize(
    ("groups", "layout", "coords"),
    [
        ({"0": ("default_pg", (0, 1, 2, 3))}, {"dp": 4}, {"dp": 3}),
        (
            {"1": ("mesh_dp", (1, 3)), "2": ("mesh_tp", (2, 3))},
            {"dp": 2, "tp": 2},
            {"dp": 1, "tp": 1},
        ),
        (
            {"1": ("DATA_PARALLEL_GROUP", (2, 3)), "2": ("PIPELINE_MODEL_PARALLEL_GROUP", (1, 3))},
            {"dp": 2, "pp": 2},
            {"dp": 1, "pp": 1},
        ),
        ({"1": ("mesh_tp", (2, 3))}, None, None),
    ],
    ids=["the whole job", "a mesh", "Megatron-LM", "an axis is missing"],
)
def test_the_descriptions_of_the_groups_give_the_layout(
    tmp_path: Path,
    groups: dict[str, tuple[str, tuple[int, ...]]],
    layout: dict[str, int] | None,
    coords: dict[str, int] | None,
) -> None:
    trace = TraceBuilder(3, 4, groups=groups)
    trace.step(0, 0, 100)
    trace.kernel("gemm", 10, 20)
    found = read_one(trace, tmp_path).manifest

    def positive(sizes: dict[str, int] | None, least: int) -> dict[str, int] | None:
        return sizes and {axis: size for axis, size in sizes.items() if size > least}

    if layout is None:
        assert (found["layout"], found["coords"]) == (None, None)
    else:
        assert positive(found["layout"], 1) == layout
        assert positive(found["coords"], 0) == coords


def test_gaps_of_any_length_are_no_compute_and_their_sum_is_kept(tmp_path: Path) -> None:
    trace = stepped()
    for number in range(900):  # gaps of 0.03 ms, of which a thousandth of the step holds two
        begin = 1 + 0.1 * number
        trace.kernel("gemm", begin, begin + 0.07, launch=begin - 0.01)
    process = read_one(trace, tmp_path)

    (forward,) = of_kind(process, SpanKind.FORWARD)
    idle = of_kind(process, SpanKind.HOST)
    assert forward.end_ns - forward.start_ns == pytest.approx(89.97 * NS_PER_MS, abs=10)
    assert sum(each.end_ns - each.start_ns for each in idle) == pytest.approx(
        899 * 0.03 * NS_PER_MS, abs=900
    )
    assert len(idle) <= 500
    assert {each.name for each in idle} == {IdleName.LATE}
    ends = [forward.start_ns, *(each.end_ns for each in idle)]
    assert all(each.start_ns >= end for each, end in zip(idle, ends[:-1], strict=True))


def test_what_other_streams_compute_begins_no_phase(tmp_path: Path) -> None:
    trace = stepped()
    trace.kernel("gemm", 10, 20)
    trace.backward(18, 60)
    trace.kernel("gemm_backward", 20, 30, launch=19, tid=AUTOGRAD)
    trace.kernel("prefetch", 30, 32, launch=15, stream=9)  # of the main thread: a forward
    trace.kernel("gemm_backward", 31, 40, launch=19.5, tid=AUTOGRAD)
    process = read_one(trace, tmp_path)

    assert spans(process, SpanKind.FORWARD) == [(10.0, 20.0)]
    assert spans(process, SpanKind.BACKWARD) == [(20.0, 40.0)]
    assert spans(process, SpanKind.HOST) == []


def test_a_host_that_synchronizes_with_a_communication_waits_for_it(tmp_path: Path) -> None:
    trace = stepped()
    trace.kernel("gemm", 10, 20)
    trace.comm("barrier", 20, 50, launch=12)
    trace.add("cudaStreamSynchronize", "cuda_runtime", 25, 50.05, tid=100)
    trace.kernel("gelu", 51, 60, launch=50.9)
    trace.add("cudaDeviceSynchronize", "cuda_runtime", 55, 60.02, tid=100)
    trace.kernel("gelu", 63, 70, launch=62.9)
    process = read_one(trace, tmp_path)

    assert spans(process, SpanKind.WAIT) == [(25.0, 50.0)]
    idle = [(each.name, each.end_ns - each.start_ns) for each in of_kind(process, SpanKind.HOST)]
    assert idle == [
        (IdleName.LATE, 5 * NS_PER_MS),
        (IdleName.LATE, 1 * NS_PER_MS),
        (IdleName.SYNCHRONIZED, 3 * NS_PER_MS),
    ]


def test_an_annotation_in_which_nothing_is_launched_is_time_of_the_host(tmp_path: Path) -> None:
    trace = stepped()
    trace.add("enumerate(DataLoader)#Loader.__next__", "user_annotation", 1, 30, tid=100)
    trace.add("tokenize", "user_annotation", 31, 40, tid=100)
    trace.add("forward", "user_annotation", 41, 60, tid=100)
    trace.kernel("gemm", 42, 50, launch=41.9)
    process = read_one(trace, tmp_path)

    assert [
        (each.kind, each.name, (each.start_ns - BASE_NS) / NS_PER_MS)
        for each in process.records
        if each.track in {"loader", "thread 100"}
    ] == [(SpanKind.DATA, "enumerate(DataLoader)", 1.0), (SpanKind.HOST, "tokenize", 31.0)]


TWO_GROUPS = {"0": ("mesh_dp", (0, 1, 2, 3)), "1": ("mesh_tp", (0, 1))}


def test_the_group_of_a_kernel_comes_from_the_first_of_its_sources(tmp_path: Path) -> None:
    trace = stepped(4, groups=TWO_GROUPS)

    def generic(begin: float, stream: int, **args: Any) -> None:  # noqa: ANN401
        trace.kernel("ncclDevKernel_Generic_1(args)", begin, begin + 1, stream=stream, **args)

    generic(10, 20, **{"Process Group Name": "1"})
    about = {"Process Group Name": "1", "Collective name": "reduce_scatter"}
    trace.add("record_param_comms", "cpu_op", 18.9, 19.1, tid=100, **about)
    trace.add("nccl:_reduce_scatter_base", "user_annotation", 18.95, 19.1, tid=100)
    generic(20, 21, **{"Process Group Name": "0"})  # its own arguments take precedence
    trace.add("record_param_comms", "cpu_op", 28.9, 29.1, tid=100, **about)
    generic(30, 22)
    generic(40, 20)  # a stream of group 1 alone
    generic(50, 23)
    process = read_one(trace, tmp_path)

    axis_of = {group_id: axis for group_id, (_, axis, _) in process.groups.items()}
    comm = sorted((each for each in process.records if each.comm), key=lambda each: each.start_ns)
    assert [axis_of[each.comm.group_id] for each in comm if each.comm] == [
        "tp", "dp", "tp", "tp", ""
    ]  # fmt: skip
    assert [each.name for each in comm][1:3] == ["reduce_scatter", "reduce_scatter"]
    assert comm[-1].flags & SpanFlag.END_BOUND
    assert [len(note) > 0 and "ncclDevKernel_Generic_1" in note for note in process.notes] == [True]


def test_a_file_without_groups_has_one_of_all_ranks(tmp_path: Path) -> None:
    trace = stepped(4, groups={})
    trace.kernel("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)", 10, 20)
    process = read_one(trace, tmp_path)

    assert [members for *_, members in process.groups.values()] == [(0, 1, 2, 3)]
    assert process.manifest["layout"]["dp"] == 4
    assert ["one group of all ranks" in note for note in process.notes] == [True]


@pytest.mark.parametrize("ranks", ["[Infinity, 0]", "[0, 1, ..., 7]", "[]", "[0, 9]", "{}", "1"])
def test_members_in_arguments_that_are_no_whole_list_make_no_group(
    tmp_path: Path, ranks: str
) -> None:
    trace = stepped(4, groups=TWO_GROUPS)
    about: dict[str, Any] = {"Process Group Ranks": ranks, "Group size": 2}
    trace.comm("allreduce", 10, 20, group="7", **about)
    process = read_one(trace, tmp_path)

    assert sorted(name for _, name, _ in process.groups.values()) == ["", "dp", "tp"]
    assert len(process.notes) == 1


def test_a_rank_without_communication_says_so_with_names_that_sound_like_it(
    tmp_path: Path,
) -> None:
    trace = stepped()
    trace.kernel("void acme::all_gather_v2<float>(float*)", 10, 20)
    trace.kernel("gemm", 20, 30)

    (note,) = read_one(trace, tmp_path).notes

    assert "acme::all_gather_v2" in note
    assert "gemm" not in note
    assert "--comm-kernel" in note


KERNELS = {
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)": "",
    "ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs4K)": "",
    "void mscclpp::allreduceAllPairs<float>(float*)": "",
    "nvshmemi_barrier_all_kernel()": "",
    "void (anonymous namespace)::multimem_one_shot_all_reduce_kernel<float, 16>(float*)": "",
    "void (anonymous namespace)::two_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(float*)": "",
    "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)": "",
    "void quickreduce::allreduce_prototype_twoshot<AllReduceTwoshot<half>, half>(half*)": "",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<3>()": "",
    "kuserbuffers_pushrecv(int, int, int*)": "",
    "void userbuffers_fp16_sum_inplace_gpu_rr<8>(int)": "",
    "void deep_ep::internode::combine<true, __nv_bfloat16>(int4*)": "ep",
    "EpDispatchIntraNodeKernel_bf16": "ep",
    "oneccl_allreduce_ring": "",
    "hcom_allReduce__428_0_1": "",
}


@pytest.mark.parametrize(("name", "axis"), KERNELS.items(), ids=KERNELS)
def test_kernels_of_libraries_that_communicate_are_known(name: str, axis: str) -> None:
    assert CommKernels().axis_of(name) == axis


@pytest.mark.parametrize(
    "name",
    [
        "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(float)",
        "void cudnn::ops::blockAllReduce<float>(float*)",
        "Memcpy DtoD (Device -> Device)",
        "triton_red_fused_native_layer_norm_3",
    ],
)
def test_kernels_that_only_sound_like_communication_compute(name: str) -> None:
    assert CommKernels().axis_of(name) is None
    assert CommKernels(["blockAll|layout|reduce|Memcpy|fused"]).axis_of(name) == ""


def stored_report(folder: Path, store_url: str) -> RunReport:
    done = import_files(
        [folder], file_format="kineto", run_id="run", meta=None, store_url=store_url
    )
    assert done.startswith("imported run run")
    with open_store(store_url) as store:
        return analyze_run(StoreSource(store), "run")


def test_the_slow_rank_of_a_job_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(4):
        trace = TraceBuilder(rank, 4)
        for step in range(8):
            jitter = 1 + 0.01 * ((3 * rank + 5 * step) % 7)
            begin = 60 * step
            trace.step(step, begin, begin + 60)
            slow = 1.4 if rank == 2 else jitter
            add_step(trace, begin + 1, reduced=begin + 56, slow=slow)
        path = trace.write(folder)
        (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()

    report = stored_report(folder, f"chdb://{tmp_path / 'store'}")

    top = report.top_finding
    assert (top.cause, top.ranks) == ("slow-compute", (2,))
    assert (report.layout.dp, report.steps) == (4, tuple(range(8)))


OPERATORS = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 1}]
REPEATED = {"ph": "X", "cat": "user_annotation", "name": "x", "ts": 1, "dur": 1}


def of_rank(rank: Any, events: list[Any] = OPERATORS, **about: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the document of a rank of two."""
    info = {"rank": rank, "world_size": 2, **about}
    return {"traceEvents": events, "distributedInfo": info}


BAD: dict[str, tuple[Any, str]] = {
    "a list": ([], "a list of Chrome events"),
    "no object": ("text", "is no JSON object"),
    "no events": ({"distributedInfo": {}}, "no list of traceEvents"),
    "events of another program": ({"traceEvents": [{"ph": "X", "ts": 1, "dur": 1}]}, "no operator"),
    "a rank of another type": (of_rank([]), "another distributedInfo"),
    "a rank out of range": (of_rank(2), "rank 2 of 2"),
    "groups of another type": (of_rank(0, pg_config=[1]), "another distributedInfo"),
    "no step": (
        of_rank(
            0,
            [7, {}, {"ph": "X", "name": 3, "ts": 1, "dur": 1}, {"ph": "X", "ts": "x"}, *OPERATORS,
             REPEATED, REPEATED],
        ),
        r"no ProfilerStep.*Annotations that repeat: x \(2 times\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("document", "reason"), BAD.values(), ids=BAD)
def test_a_file_of_another_form_is_refused(tmp_path: Path, document: Any, reason: str) -> None:  # noqa: ANN401
    path = tmp_path / "x.json"
    path.write_text(json.dumps(document))

    with pytest.raises(TraceError, match=reason):
        list(read_traces([path], "run"))


def with_groups(folder: Path, rank: int, world_size: int, config: list[dict[str, Any]]) -> Path:
    """Write a trace of one step with these groups."""
    trace = TraceBuilder(rank, world_size)
    trace.step(0, 0, 100)
    trace.kernel("gemm", 10, 20)
    document = trace.document()
    document["distributedInfo"]["pg_config"] = config
    path = folder / f"rank{rank}.json"
    path.write_text(json.dumps(document))
    return path


def of_all_ranks(num: int, *, first: int = 0) -> list[dict[str, Any]]:
    """Return groups of all ranks, which torch writes without their members."""
    return [
        {"pg_name": str(number), "pg_desc": "undefined", "ranks": []}
        for number in range(first, first + num)
    ]


def test_the_groups_of_a_large_job_are_read_and_written_once(tmp_path: Path) -> None:
    mine = {"pg_name": "tp", "pg_desc": "mesh_tp", "ranks": list(range(8))}
    paths = [with_groups(tmp_path, rank, 16_384, [*of_all_ranks(60), mine]) for rank in (0, 1)]

    first, second = read_traces(paths, "run")

    assert sorted(len(members) for *_, members in first.groups.values()) == [8] + 60 * [16_384]
    assert second.groups == {}


def test_groups_of_too_many_members_are_refused_in_one_file_and_in_all(tmp_path: Path) -> None:
    reason = "has process groups of 62,914,560 members, more than 4,194,304: remove those"
    paths = [with_groups(tmp_path, 0, 1 << 20, of_all_ranks(60))]
    with pytest.raises(TraceError, match=reason):
        list(read_traces(paths, "run"))

    paths = []
    paths = [
        with_groups(tmp_path, rank, 1 << 20, of_all_ranks(3, first=3 * rank)) for rank in (0, 1)
    ]
    with pytest.raises(TraceError, match=f"{paths[1].name}: has process groups of 6,291,456"):
        list(read_traces(paths, "run"))


@pytest.mark.parametrize("members", [[0, -1], [0, 4], [0, 0], [[0], [1]]])
def test_members_that_are_no_ranks_of_the_job_are_refused(tmp_path: Path, members: Any) -> None:  # noqa: ANN401
    config = [{"pg_name": "0", "ranks": members}]

    with pytest.raises(TraceError, match="another distributedInfo"):
        list(read_traces([with_groups(tmp_path, 0, 4, config)], "run"))


def test_a_group_without_its_rank_is_no_part_of_the_layout(tmp_path: Path) -> None:
    others = {"pg_name": "1", "pg_desc": "mesh_ep", "ranks": [1, 2]}
    everyone = {"pg_name": "0", "pg_desc": "mesh_dp", "ranks": []}

    (process,) = read_traces([with_groups(tmp_path, 0, 4, [everyone, others])], "run")

    assert process.manifest["layout"]["dp"] == 4
    assert process.manifest["layout"]["ep"] == 1


DEEP: list[Any] = []
for _ in range(300):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "event",
    [
        {"ts": -1e30, "dur": 1e30},
        {"ts": 10**400, "dur": 0.5},
        {"ts": -(10**400), "dur": 10**400},
        {"ts": 0, "dur": float("inf")},
        {"ts": 0, "dur": float("nan")},
        {"ts": 0, "dur": 10**17},
        {"ts": 0, "dur": 1, "args": []},
    ],
    ids=range(7),
)
def test_an_event_without_times_is_left_out(tmp_path: Path, event: dict[str, Any]) -> None:
    trace = one_step()
    trace.events.append({"ph": "X", "cat": "", "name": "ProfilerStep#9", "args": {}, **event})

    assert spans(read_one(trace, tmp_path), None) == [(0.0, 100.0)]


@pytest.mark.parametrize("begin", [[0] * 100_000, "0" * 1_000_000], ids=["list", "text"])
def test_a_time_of_another_type_is_not_multiplied(tmp_path: Path, begin: Any) -> None:  # noqa: ANN401
    trace = one_step()
    trace.events.append({"ph": "X", "cat": "", "name": "x", "ts": begin, "dur": type(begin)()})
    path = trace.write(tmp_path)

    tracemalloc.start()
    list(read_traces([path], "run"))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < 100_000_000


def test_a_file_that_ranks_were_merged_into_is_refused(tmp_path: Path) -> None:
    trace = one_step()
    for event in trace.events:
        event["pid"] = f"[TP00-DP00-PP00-EP00] {event['pid']}"  # as SGLang merges

    with pytest.raises(TraceError, match="events of several ranks"):
        read_one(trace, tmp_path)


def test_names_of_another_type_are_empty(tmp_path: Path) -> None:
    trace = one_step()
    for event in trace.events:
        event["tid"] = DEEP
        event["args"] |= {"stream": DEEP, "Collective name": DEEP, "dtype": DEEP}

    process = read_one(trace, tmp_path)

    assert of_kind(process, SpanKind.DP_COMM)[0].track == "comm dp"


def test_a_text_of_more_values_than_a_trace_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "values.json"
    path.write_bytes(b'{"traceEvents": [[' + 1_000_000 * b"{}," + b"{}]]}")

    with pytest.raises(TraceError, match="more values than a trace of its size"):
        list(read_traces([path], "run"))


def test_a_text_that_is_no_json_and_a_small_file_of_much_text_are_refused(tmp_path: Path) -> None:
    contents = {"text.json": b"{", "torn.json.gz": gzip.compress(b"[]")[:-8]}
    contents["bomb.json.gz"] = gzip.compress(b" " * (8 << 20))
    for name, content in contents.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(TraceError, match=r"no JSON file|more than|can't be read"):
            list(read_traces([path], "run"))


def test_windows_of_a_rank_are_joined_wherever_their_files_are(tmp_path: Path) -> None:
    paths = []
    for step in (5, 15):
        folder = tmp_path / f"step{step}"
        folder.mkdir()
        for rank in (0, 1):
            trace = TraceBuilder(rank, 2)
            trace.step(step, 0, 100)
            add_step(trace, 10, reduced=60)
            paths.append(trace.write(folder))

    processes = list(read_traces(paths, "run"))

    assert [process.rank for process in processes] == [0, 1]
    for process in processes:
        assert {record.step for record in process.records} == {5, 15}
    assert [len(process.groups) for process in processes] == [1, 0]


def test_ranks_that_are_named_after_the_events_are_found(tmp_path: Path) -> None:
    paths = []
    for number, rank in enumerate((0, 1, 0)):
        trace = TraceBuilder(rank, 2)
        trace.step(number, 0, 100)
        add_step(trace, 10, reduced=60)
        document = trace.document()
        events = {"traceEvents": document.pop("traceEvents"), "padding": " " * PIECE_BYTES}
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(events | document))

    processes = list(read_traces(paths, "run"))

    assert [process.rank for process in processes] == [0, 1]
    assert {record.step for record in processes[0].records} == {0, 2}


def test_two_files_of_one_step_are_refused(tmp_path: Path) -> None:
    path = one_step().write(tmp_path)
    again = tmp_path / "again.json"
    again.write_bytes(path.read_bytes())
    with pytest.raises(TraceError, match="of rank 0, as has"):
        list(read_traces([path, again], "run"))


def test_a_folder_without_traces_and_a_missing_name_are_refused(tmp_path: Path) -> None:
    for run_id, reason in (("run", "neither a trace nor a folder"), (None, "needs --run NAME")):
        with pytest.raises(BadInputError, match=reason):
            import_files([tmp_path], file_format="kineto", run_id=run_id, meta=None, store_url=None)


JOB = """
import sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]))
optimizer = torch.optim.AdamW(model.parameters())
with profile(
    activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=30),
    on_trace_ready=lambda done: done.export_chrome_trace(f"{sys.argv[1]}/rank{rank}.json"),
) as profiler:
    for _ in range(32):  # one that the machine disturbs is few of them
        loss = model(torch.randn(8, 64)).pow(2).mean()
        if rank == 1:
            time.sleep(0.2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        profiler.step()
dist.destroy_process_group()
"""


@pytest.mark.nightly
@pytest.mark.alone
def test_a_profiled_job_of_two_processes_names_the_rank_that_sleeps(tmp_path: Path) -> None:
    folder, program = tmp_path / "traces", tmp_path / "job.py"
    folder.mkdir()
    program.write_text(JOB)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(program), str(folder)],
        check=True,
        capture_output=True,
        cwd=ROOT,
        env=trainer_environment(),
        timeout=240,
    )

    report = stored_report(folder, f"chdb://{tmp_path / 'store'}")

    # On a busy machine the steps of the profiler itself may cost more, on all ranks.
    critical = [each for each in report.findings if each.severity is Severity.CRITICAL]
    assert ("host-stall", (1,)) in {(each.cause, each.ranks) for each in critical}
    assert len(report.steps) == 30

"""Communication in a trace of `torch.profiler`: which kernels it is, and of which group."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from rankscope.tracer.span import NONE, SpanKind
from rankscope.tracer.topology import AXES

from .kineto_events import BACKEND, HOST_COMM, MAX_NS, text_of
from .kineto_reader import WHOLE_JOB, Group, axis_of, check_members, index_around
from .spool_folder import Comm, make_group_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .kineto_events import Event, Work
    from .kineto_reader import RankTrace


class Library(NamedTuple):
    """Kernels of a library that communicates."""

    name: str
    pattern: str
    """Searched in the demangled name of a kernel, without regard to case."""

    axis: str = ""
    """Axis of the groups in which it is used, if it has one use only."""


LIBRARIES = (
    Library("NCCL, RCCL", r"\b(?:nccl|rccl)"),
    Library("MSCCL, MSCCL++", r"msccl"),
    Library("NVSHMEM, rocSHMEM", r"\b(?:nv|roc)shmem|barrier_on_stream_kernel"),
    Library(
        "symmetric memory of PyTorch",
        r"multimem_(?:all|one|two|reduce)|(?:one|two)_shot_(?:all_reduce|reduce_scatter)"
        r"|(?:oneShot|twoShot|hybridCubeMesh)AllReduceKernel"
        r"|\ballToAllV|exchangeSplitAndOffset|\b(?:put|wait)_signal_kernel",
    ),
    Library(
        "custom all-reduce of vLLM, SGLang, aiter and FlashInfer",
        r"cross_device_reduce|quickreduce::|all_?reduce_prototype|pcie_ipc_comm",
    ),
    Library(
        "all-reduce of TensorRT-LLM and FlashInfer",
        r"all_?reduce_fusion_kernel|(?:one|two)shot_?all_?reduce|moe_\w*all_?reduce\w*kernel"
        r"|lamport\w*all_?reduce",
    ),
    Library("user buffers of Transformer Engine", r"userbuffers"),
    Library(
        "DeepEP, UCCL-EP",
        r"(?:deep_ep|uccl)::(?:intranode|internode|internode_ll|elastic|hybrid_ep)::"
        r"|hybrid_ep::(?:dispatch|combine)",
        axis="ep",
    ),
    Library("MoRI", r"\bEp(?:Dispatch|Combine)\w*Kernel", axis="ep"),
    Library("oneCCL", r"\boneccl|\bccl::|\bccl_(?:all|reduce|broadcast|send|recv)"),
    Library("HCCL", r"\bhccl|\bhcom_"),
)
"""Libraries whose kernels communicate.

Source: names of ``__global__`` functions in NCCL (``ncclKernel_``, ``ncclDevKernel_``,
``ncclSymkDevKernel_``; RCCL's are equal), MSCCL++, NVSHMEM, PyTorch (``CUDASymmetricMemoryOps.cu``,
``intra_node_comm.cu``, ``nvshmem_extension.cu``), vLLM (``custom_all_reduce.cuh``), quick reduce of
aiter and SGLang, TensorRT-LLM and FlashInfer (``trtllm_allreduce_fusion.cuh``), Transformer Engine
(``userbuffers.cu``), DeepEP (its layout kernels only compute) and MoRI (``intranode.hpp``); of
oneCCL and HCCL, names in published profiles.
"""

ELEMENT_BYTES = {
    "Double": 8, "Long": 8, "ComplexFloat": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2,
    "Short": 2, "Byte": 1, "Char": 1, "Bool": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip
"""Bytes of one element by the name of its type in ``c10``; of any other, sizes are unknown."""

SOUNDS_LIKE_COMM = re.compile(
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast_kernel|send_?recv|shmem"
    r"|dispatch|combine|peer|p2p|lamport",
    re.IGNORECASE,
)
"""Names that are shown to a user whose trace has no communication; they decide nothing."""

NAME_CHARS = 1024
"""Of a kernel's name that are searched: the function comes before its template and arguments."""

MAX_NAMES = 3
MAX_NESTED = 16
"""Calls of one thread that are searched for the one around a launch."""

UNKNOWN_GROUP = "unknown group"
COALESCED = "coalesced"
"""Name of a call that issues several, which has that of none."""


class CommKernels:
    """The kernels that communicate, by name.

    Args:
        patterns: Regular expressions of further names.

    Raises:
        re.error: One is no regular expression.
    """

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        self._patterns = [
            *((re.compile(pattern, re.IGNORECASE), "") for pattern in patterns),
            *((re.compile(each.pattern, re.IGNORECASE), each.axis) for each in LIBRARIES),
        ]
        self._axes: dict[str, str | None] = {}

    def axis_of(self, name: str) -> str | None:
        """Return the axis of the library of a kernel, "" for any; None if it is none of these."""
        if name not in self._axes:
            axes = (axis for pattern, axis in self._patterns if pattern.search(name[:NAME_CHARS]))
            self._axes[name] = next(axes, None)
        return self._axes[name]


class Call(NamedTuple):
    """A communication with its place in its group."""

    work: Work
    name: str
    """Of its collective, else of its kernel."""

    track: str
    step: int
    """`NONE` outside of all steps."""

    comm: Comm
    is_known: bool
    """Whether its group is known. If not, it has a group of this rank alone."""


class Communication(NamedTuple):
    """The communication of a rank."""

    calls: list[Call]
    groups: dict[str, Group]
    """By name: those of the file, and those that its communication names or needs."""

    notes: list[str]
    """What is assumed, and what is unknown."""


def split_communication(trace: RankTrace, kernels: CommKernels) -> None:
    """Move the kernels that communicate from the compute of a trace to its communication."""
    if not trace.is_of_device:
        return
    chosen = [kernels.axis_of(work.event["name"]) is not None for work in trace.compute]
    trace.comm += [work for work, is_comm in zip(trace.compute, chosen, strict=True) if is_comm]
    trace.comm.sort(key=lambda work: work[:2])
    trace.compute = [
        work for work, is_comm in zip(trace.compute, chosen, strict=True) if not is_comm
    ]


def find_communication(trace: RankTrace, kernels: CommKernels) -> Communication:
    """Find the group of each communication of a trace, and number it.

    The group is that of the kernel's own arguments, else that of the call around its launch, else
    that of the other communication on its stream, else the only one of its library's axis, else the
    only one. A file without groups has one of all ranks.

    Raises:
        TraceError: The groups have more than `MAX_MEMBERS` members.
    """
    groups, notes = dict(trace.groups), []
    items = []
    for work in trace.comm:
        index = index_around(trace.steps, work.launch_ns)
        step = NONE if index == NONE else trace.steps[index][2]
        items.append((work, step, _arguments(trace, work)))
    for _, _, args in items:
        _add_named_group(trace, groups, args)
    if items and not groups:
        everyone = tuple(range(trace.world_size))
        axis = "dp" if trace.world_size > 1 else WHOLE_JOB
        groups[WHOLE_JOB] = Group(WHOLE_JOB, axis, everyone, make_group_id(WHOLE_JOB, everyone))
        if trace.world_size > 1:
            notes.append(
                "the profile describes no process groups (torch before 2.4): all communication is"
                " taken for that of one group of all ranks"
            )
    check_members(trace.path, sum(len(group.members) for group in groups.values()))
    of_stream = _groups_of_streams(items, groups)
    calls: list[Call] = []
    counts: Counter[tuple[object, ...]] = Counter()
    unknown: Counter[str] = Counter()
    for work, step, args in items:
        group = _group_of(work, args, groups, of_stream, kernels)
        name = _name_of(work, args)
        is_known = group is not None
        if group is None:
            unknown[name] += 1
            alone = (trace.rank,)
            group = Group(UNKNOWN_GROUP, "", alone, make_group_id(UNKNOWN_GROUP, alone))
            groups[UNKNOWN_GROUP] = group
        comm = _number(trace.rank, group, args, step, counts)
        calls.append(Call(work, name, f"comm {work.stream or comm.axis}", step, comm, is_known))
    if unknown:
        names = ", ".join(name for name, _ in unknown.most_common(MAX_NAMES))
        notes.append(
            f"the process group of communication is unknown ({names}): who waits for whom in it is"
            " unknown too"
        )
    if trace.world_size > 1 and len({step for _, step, _ in items} - {NONE}) * 2 < len(trace.steps):
        notes.append(_missing_note(trace))
    return Communication(calls, groups, notes)


def _arguments(trace: RankTrace, work: Work) -> Event:
    """Return the arguments of a communication: its own, else those of the calls around it."""
    merged: Event = {}
    for event in _calls_around(trace.calls.get(work.thread, ()), work.launch_ns):
        annotation = BACKEND.fullmatch(event["name"])
        if annotation and annotation[2] != COALESCED:
            merged.setdefault("Collective name", annotation[2])
        merged |= event["args"]
    merged |= work.event["args"]
    return merged


def _calls_around(calls: Sequence[tuple[int, int, Event]], at_ns: int) -> Iterator[Event]:
    """Yield the calls around a time, the outermost first; calls are sorted by begin."""
    last = bisect_right(calls, at_ns, key=lambda call: call[0])
    for begin, end, event in calls[max(last - MAX_NESTED, 0) : last]:
        if begin <= at_ns < end:
            yield event


def _add_named_group(trace: RankTrace, groups: dict[str, Group], args: Event) -> None:
    """Add the group that the arguments of a communication describe, if the file does not."""
    name = text_of(args.get("Process Group Name"))
    if not name or name in groups:
        return
    try:
        ranks = json.loads(text_of(args.get("Process Group Ranks")))
        members = tuple(sorted({int(rank) for rank in ranks}))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return  # a long list is cut: "[0, 1, ..., 63]"
    is_whole = len(members) == args.get("Group size", len(members)) > 0
    if is_whole and 0 <= members[0] <= members[-1] < trace.world_size and trace.rank in members:
        described = text_of(args.get("Process Group Description"))
        axis = axis_of(described)
        has_axes = bool({group.axis for group in groups.values()} & AXES)
        if axis == WHOLE_JOB and not has_axes:
            axis = "dp"
        groups[name] = Group(name, axis, members, make_group_id(name, members))


def _groups_of_streams(
    items: Sequence[tuple[Work, int, Event]], groups: dict[str, Group]
) -> dict[str, Group]:
    """Return the group of each stream whose named communication is all of one group."""
    names: defaultdict[str, set[str]] = defaultdict(set)
    for work, _, args in items:
        name = text_of(args.get("Process Group Name"))
        if name in groups:
            names[work.stream].add(name)
    return {
        stream: groups[next(iter(own))] for stream, own in names.items() if stream and len(own) == 1
    }


def _group_of(
    work: Work,
    args: Event,
    groups: dict[str, Group],
    of_stream: dict[str, Group],
    kernels: CommKernels,
) -> Group | None:
    group = groups.get(text_of(args.get("Process Group Name"))) or of_stream.get(work.stream)
    if group is not None:
        return group
    if axis := kernels.axis_of(work.event["name"]):
        of_axis = [group for group in groups.values() if group.axis == axis]
        if len(of_axis) == 1:
            return of_axis[0]
    # Groups of equal members differ in their name only.
    own = {group.members for name, group in groups.items() if name != UNKNOWN_GROUP}
    return next(iter(groups.values())) if len(own) == 1 else None


def _number(
    rank: int, group: Group, args: Event, step: int, counts: Counter[tuple[object, ...]]
) -> Comm:
    """Return a communication with its number in its group."""
    src, dst = args.get("Src Rank"), args.get("Dst Rank")
    ends, kind = None, group.kind
    if is_count(src) and is_count(dst) and max(src, dst) < len(group.members):
        ends = group.members[src], group.members[dst]
        kind = SpanKind.PP_SEND if ends[0] == rank else SpanKind.PP_RECV
    key = (group.name, ends, step)
    seq = args.get("Seq")
    number = seq if ends is None and is_count(seq) else (step << 24) + counts[key]
    counts[key] += 1
    return Comm(
        group_id=group.group_id,
        axis=group.axis,
        kind=kind,
        # The profiler begins in the same step on all ranks, not in the same call.
        seq=number,
        src_rank=NONE if ends is None else ends[0],
        dst_rank=NONE if ends is None else ends[1],
        num_bytes=_num_bytes(args),
    )


def is_count(value: Any) -> TypeGuard[int]:  # noqa: ANN401  # of any JSON type
    """Return whether a value is a number of things."""
    return isinstance(value, int) and 0 <= value < MAX_NS


def _num_bytes(args: Event) -> int:
    """Return the bytes of the larger side; `NONE` if they are unknown."""
    sizes = [args.get(name) for name in ("In msg nelems", "Out msg nelems")]
    element = ELEMENT_BYTES.get(text_of(args.get("dtype")))
    known = [size for size in sizes if is_count(size)]
    num = max(known) * element if known and element else NONE
    return num if num < MAX_NS else NONE


def _name_of(work: Work, args: Event) -> str:
    """Return the name of a collective, else that of its kernel without template and arguments."""
    bare = re.sub(r"\(anonymous namespace\)::|^void ", "", HOST_COMM.sub("", work.event["name"]))
    return text_of(args.get("Collective name")) or re.split(r"[<(]", bare)[0]


def _missing_note(trace: RankTrace) -> str:
    """Return a sentence about a rank that communicates in less than half of its steps."""
    names = Counter(work.event["name"] for work in trace.compute)
    alike = [name for name, _ in names.most_common() if SOUNDS_LIKE_COMM.search(name[:NAME_CHARS])][
        :MAX_NAMES
    ]
    hint = f" (it has {', '.join(name[:60] for name in alike)})" if alike else ""
    return (
        f"the profile of a job of {trace.world_size} ranks has no communication in most of its"
        f" steps: if kernels of yours communicate{hint}, name them with --comm-kernel PATTERN"
    )

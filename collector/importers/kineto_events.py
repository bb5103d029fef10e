"""Events of a file of `torch.profiler` that say something about its job.

Source: categories of Kineto's ``ActivityType.cpp``; those of torch 1.8 as its TensorBoard plugin
maps them (``EventTypeMap``).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from operator import itemgetter
from sys import intern
from typing import TYPE_CHECKING, Any, NamedTuple

from .intervals import Intervals, unite
from .operator_costs import OPERATORS, find_cost

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .operator_costs import Cost

Event = dict[str, Any]
Interval = tuple[int, int]

MAX_NS = 1 << 62
MAX_US = MAX_NS / 2000

OPERATOR, ANNOTATION, KERNEL, LAUNCH = "operator", "annotation", "kernel", "launch"
CATEGORIES = {
    "cpu_op": OPERATOR, "Operator": OPERATOR,
    "user_annotation": ANNOTATION, "ProfilerStep": ANNOTATION, "": ANNOTATION,
    "kernel": KERNEL, "gpu_memcpy": KERNEL, "gpu_memset": KERNEL,
    "Kernel": KERNEL, "Memcpy": KERNEL, "Memset": KERNEL,
    "cuda_runtime": LAUNCH, "cuda_driver": LAUNCH, "hip_runtime": LAUNCH, "Runtime": LAUNCH,
    "xpu_runtime": LAUNCH, "xpu_driver": LAUNCH, "mtia_runtime": LAUNCH,
    "privateuse1_runtime": LAUNCH, "privateuse1_driver": LAUNCH,
}  # fmt: skip
"""What an event is by its category; those of torch 1.8 begin with a capital. Nothing is read of any
other: copies of annotations on the device, arrows, functions of Python."""

CATEGORIES_TODAY = {"Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}

COMM_ARGS = frozenset({
    "Collective name", "dtype", "In msg nelems", "Out msg nelems", "Group size", "Seq",
    "Process Group Name", "Process Group Description", "Process Group Ranks", "Src Rank",
    "Dst Rank",
})  # fmt: skip
"""Arguments of a communication; of a kernel only these are kept: the others are most of a file."""

BACKWARD_PREFIX = "autograd::engine::evaluate_function"
OPTIMIZER_PREFIX = "Optimizer.step#"
LOADER_PREFIX = "enumerate(DataLoader)"
SYNCHRONIZATION = "Synchronize"
CALL = "record_param_comms"
BACKEND = re.compile(r"(nccl|rccl|gloo|mpi|ucc|xccl|hccl|mccl|cncl|custom):(\w+)")
"""Annotation of a call of communication, as the backends of ``torch.distributed`` write it."""

HOST_COMM = re.compile(r"(?:gloo|mpi|ucc):|oneccl_bindings_for_pytorch::cpu_work::")
"""Communication of processors."""

COMM_OPERATOR = re.compile(r"_?c10d(?:_functional)?::")
WAIT_OPERATOR = "c10d_functional::wait_tensor"

OWN_PREFIXES = (
    BACKWARD_PREFIX, OPTIMIZER_PREFIX, LOADER_PREFIX, "nccl:", "gloo:", "Optimizer.",
    "DistributedDataParallel.", "FSDP::", "FullyShardedDataParallel.", "record_param_comms",
    "PyTorch Profiler", "## Call CompiledFxGraph", "Torch-Compiled Region", "TorchDynamo",
    "Pregraph bytecode",
)  # fmt: skip
"""Begins of the annotations that PyTorch writes itself."""

ANNOTATED = (BACKWARD_PREFIX, OPTIMIZER_PREFIX, LOADER_PREFIX, "ProfilerStep#", CALL)
"""Begins of names that are annotations, though older torch gives them the category of operators."""

DEVICE_BACKEND = re.compile(r"nccl|rccl|xccl|hccl", re.IGNORECASE)
MERGED = re.compile(r"\[(?:TP|DP|PP|EP)\d+")
"""Begin of the names of processes that the profile merger of SGLang gives."""

STARTS_WORK = re.compile(r"Launch|Memcpy")

TEXT_TYPES = frozenset({str, int, float, bool})

PLAIN, COSTED, BACKWARD, CALL_OF_COMM, NAMED = range(5)
"""What the name of an operator or an annotation says of it."""


class Work(NamedTuple):
    """A kernel of the device, or an outermost operator of the processor."""

    start_ns: int
    end_ns: int
    launch_ns: int
    thread: str
    """That launched it."""

    event: Event
    """Its name, category ``cat`` and those of its arguments ``args`` that are in `COMM_ARGS`."""

    stream: str = ""
    """Of the device; a processor has none."""


class Annotation(NamedTuple):
    """An interval of the host that was given a name. Times are Unix ns."""

    start_ns: int
    end_ns: int
    thread: str
    name: str
    is_own: bool
    """True if PyTorch or the job annotated it; False if older torch calls it an operator."""


class Events:
    """The work and the annotations of a file, in µs of the file: its base time may come last.

    Args:
        step_name: Begin of the name of an annotation that older torch may take for an operator.
    """

    def __init__(self, *, step_name: str | None = None) -> None:
        self.is_of_profiler = False
        """True if any event has a category of `CATEGORIES`."""

        self.is_merged = False
        """True if processes are named as in a file that several ranks' traces were merged into."""

        self._annotated = ANNOTATED if step_name is None else (*ANNOTATED, step_name)
        self._name_kinds: dict[str, int] = {}
        self._call_kinds: dict[str, tuple[bool, bool]] = {}
        self._kernels: list[tuple[float, float, str, str, str, Event]] = []
        self._plain_kernels: dict[tuple[str, str], Event] = {}
        self._launches: dict[str, tuple[float, str]] = {}
        self._operators: list[tuple[float, float, str, str]] = []
        self._annotations: list[tuple[float, float, str, str, bool]] = []
        self._backward: list[tuple[float, float, str]] = []
        self._calls: list[tuple[float, float, str, Event]] = []
        self._host_comm: list[tuple[float, float, str, Event]] = []
        self._synchronizations: list[tuple[float, float, str]] = []
        self._num_started = 0
        self._costs: list[tuple[float, float, str, Cost]] = []

    @property
    def is_of_device(self) -> bool:
        """True if there are kernels."""
        return bool(self._kernels)

    def add(self, events: Iterable[Any]) -> None:
        """Add the events that are intervals of time; absent arguments are added to them."""
        add_kind = {
            OPERATOR: self._add_operator, ANNOTATION: self._add_annotation,
            KERNEL: self._add_kernel, LAUNCH: self._add_launch,
        }  # fmt: skip
        add_category = {category: add_kind[kind] for category, kind in CATEGORIES.items()}
        for event in events:
            if type(event) is not dict or event.get("ph") != "X":
                continue
            category = event.setdefault("cat", "")
            add = add_category.get(category) if type(category) is str else None
            if add is None:
                continue
            name, args = event.get("name"), event.setdefault("args", {})
            begin: Any = event.get("ts")
            duration: Any = event.get("dur")
            if type(name) is str and type(args) is dict and _are_times(begin, duration):
                add(event, begin, duration, intern(name))
                self.is_of_profiler |= category != ""

    def _add_kernel(self, event: Event, begin: float, duration: float, name: str) -> None:
        args, process = event["args"], event.get("pid")
        self.is_merged |= type(process) is str and MERGED.match(process) is not None
        category: str = CATEGORIES_TODAY.get(event["cat"]) or event["cat"]
        if COMM_ARGS.isdisjoint(args):
            key = name, category
            kept = self._plain_kernels.get(key)
            if kept is None:
                kept = self._plain_kernels[key] = {"name": name, "cat": category, "args": {}}
        else:
            own = {key: value for key, value in args.items() if key in COMM_ARGS}
            kept = {"name": name, "cat": category, "args": own}
        number, stream = text_of(args.get("correlation")), intern(text_of(args.get("stream")))
        thread = intern(text_of(event.get("tid")))
        self._kernels.append((begin, duration, number, thread, stream, kept))
        self._operators.clear()  # they only launched

    def _add_launch(self, event: Event, begin: float, duration: float, name: str) -> None:
        kinds = self._call_kinds.get(name)
        if kinds is None:
            kinds = SYNCHRONIZATION in name, STARTS_WORK.search(name) is not None
            self._call_kinds[name] = kinds
        thread = intern(text_of(event.get("tid")))
        if "correlation" in event["args"]:
            self._launches[text_of(event["args"]["correlation"])] = begin, thread
        synchronizes, starts_work = kinds
        if synchronizes:
            self._synchronizations.append((begin, duration, thread))
        self._num_started += starts_work

    def _add_operator(self, event: Event, begin: float, duration: float, name: str) -> None:
        kind = self._name_kinds.get(name)
        if kind is None:
            kind = self._classify(name)
        args = event["args"]
        if kind == COSTED or "kernel_flop" in args or "kernel_num_gb" in args:
            if cost := find_cost(name, args):
                self._costs.append((begin, duration, intern(text_of(event.get("tid"))), cost))
        elif kind != PLAIN:
            self._add_annotation(event, begin, duration, name)
        if not self._kernels:
            self._operators.append((begin, duration, intern(text_of(event.get("tid"))), name))

    def _add_annotation(self, event: Event, begin: float, duration: float, name: str) -> None:
        kind = self._name_kinds.get(name)
        if kind is None:
            kind = self._classify(name)
        thread = intern(text_of(event.get("tid")))
        if kind == BACKWARD:
            self._backward.append((begin, duration, thread))
        elif kind == CALL_OF_COMM:
            if HOST_COMM.match(name):
                self._host_comm.append((begin, duration, thread, event))
            if name == CALL or BACKEND.fullmatch(name):
                self._calls.append((begin, duration, thread, event))
        else:
            is_own = CATEGORIES[event["cat"]] is ANNOTATION
            self._annotations.append((begin, duration, thread, name, is_own))

    def _classify(self, name: str) -> int:
        if name == CALL or BACKEND.fullmatch(name) or HOST_COMM.match(name):
            kind = CALL_OF_COMM
        elif name.startswith(BACKWARD_PREFIX):
            kind = BACKWARD
        elif name.startswith(self._annotated):
            kind = NAMED
        else:
            kind = COSTED if name in OPERATORS else PLAIN
        self._name_kinds[name] = kind
        return kind

    def misses_device(self, document: Event) -> bool:
        """Return whether there are no kernels although the job computes on a device.

        It does if it launched something or NCCL communicated, or if it has a device and does not
        communicate by gloo.
        """
        if self._kernels:
            return False
        has_nccl = any(event["name"].startswith("nccl:") for *_, event in self._calls)
        about = document.get("distributedInfo")
        backend = text_of(about.get("backend")) if isinstance(about, dict) else ""
        has_device = bool(document.get("deviceProperties")) or DEVICE_BACKEND.search(backend)
        return bool(self._num_started or has_nccl or (has_device and not self._host_comm))

    def kernels(self, base_ns: int) -> list[Work]:
        """Return the kernels, sorted by begin. One without a launch began as it was launched."""
        works = []
        for begin, duration, number, own_thread, stream, event in self._kernels:
            launch_us, thread = self._launches.get(number) or (begin, own_thread)
            start_ns = base_ns + round(begin * 1000)
            end_ns, launch_ns = start_ns + round(duration * 1000), base_ns + round(launch_us * 1000)
            works.append(Work(start_ns, end_ns, launch_ns, thread, event, stream))
        works.sort(key=itemgetter(0, 1))
        return works

    def outermost_operators(self, base_ns: int) -> list[Work]:
        """Return the operators that no other one of their thread contains, sorted by begin.

        One that calls communication may wait for it: those inside of it are taken instead.
        """
        outermost: list[Work] = []
        until: dict[str, int] = {}
        called: dict[str, list[float]] = {}
        for begin, _, thread, name in sorted(self._operators, key=lambda each: each[0]):
            if COMM_OPERATOR.match(name):
                called.setdefault(thread, []).append(begin)
        for begin, duration, thread, name in sorted(
            self._operators, key=lambda operator: (operator[0], -operator[1])
        ):
            start_ns, end_ns = _times(base_ns, begin, duration)
            calls = called.get(thread, ())
            inside = bisect_left(calls, begin + duration) - bisect_left(calls, begin)
            is_call = COMM_OPERATOR.match(name) is not None
            if name.endswith(WAIT_OPERATOR) or inside > is_call:
                continue
            if start_ns >= until.get(thread, 0):
                until[thread] = end_ns
                event = {"name": name, "cat": "cpu_op", "args": {}}
                outermost.append(Work(start_ns, end_ns, start_ns, thread, event))
        return outermost

    def host_comm(self, base_ns: int) -> list[Work]:
        """Return the communication of processors, sorted by begin."""
        works = []
        for begin, duration, thread, event in self._host_comm:
            start_ns, end_ns = _times(base_ns, begin, duration)
            works.append(Work(start_ns, end_ns, start_ns, thread, event))
        return sorted(works, key=lambda work: work[:2])

    def calls(self, base_ns: int) -> dict[str, list[tuple[int, int, Event]]]:
        """Return the calls of communication by thread, sorted by begin; one may contain another."""
        calls: dict[str, list[tuple[int, int, Event]]] = {}
        for begin, duration, thread, event in self._calls:
            calls.setdefault(thread, []).append((*_times(base_ns, begin, duration), event))
        for own in calls.values():
            own.sort(key=lambda call: (call[0], -call[1]))
        return calls

    def synchronizations(self, base_ns: int) -> dict[str, list[Interval]]:
        """Return by thread when a host waits for its device; disjoint, ascending."""
        return _unite_by_thread(self._synchronizations, base_ns)

    def backward(self, base_ns: int) -> dict[str, list[Interval]]:
        """Return by thread when the autograd engine runs a backward; disjoint, ascending."""
        return _unite_by_thread(self._backward, base_ns)

    def costs(self, base_ns: int) -> dict[str, list[tuple[int, int, Cost]]]:
        """Return begin, end and work of operators by thread, as far as the file has it.

        An operator that another one contains does a part of its work.
        """
        costs: dict[str, list[tuple[int, int, Cost]]] = {}
        for begin, duration, thread, cost in sorted(self._costs, key=lambda row: (row[0], -row[1])):
            own = costs.setdefault(thread, [])
            start_ns, end_ns = _times(base_ns, begin, duration)
            if not own or start_ns >= own[-1][1]:
                own.append((start_ns, end_ns, cost))
        return costs

    def annotations(self, base_ns: int) -> list[Annotation]:
        """Return the annotations, sorted by begin, those that contain others first."""
        annotations = []
        for begin, duration, thread, name, is_own in self._annotations:
            start_ns, end_ns = _times(base_ns, begin, duration)
            annotations.append(Annotation(start_ns, end_ns, thread, name, is_own))
        return sorted(annotations, key=lambda each: (each.start_ns, -each.end_ns))


def _unite_by_thread(
    rows: Sequence[tuple[float, float, str]], base_ns: int
) -> dict[str, list[Interval]]:
    by_thread: dict[str, list[Interval]] = {}
    for begin, duration, thread in rows:
        by_thread.setdefault(thread, []).append(_times(base_ns, begin, duration))
    return {thread: unite(Intervals.of(own)).to_rows() for thread, own in by_thread.items()}


def _times(base_ns: int, begin: float, duration: float) -> Interval:
    start_ns = base_ns + round(begin * 1000)
    return start_ns, start_ns + round(duration * 1000)


def _are_times(begin: Any, duration: Any) -> bool:  # noqa: ANN401  # of any JSON type
    try:
        return bool(0 <= begin < MAX_US and 0 <= duration < MAX_US)
    except TypeError:
        return False


def text_of(value: Any) -> str:  # noqa: ANN401  # of any JSON type
    """Return a name or a number as text; "" of anything else."""
    return str(value) if type(value) in TEXT_TYPES else ""

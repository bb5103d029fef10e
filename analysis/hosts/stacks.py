"""Stacks of ranks in a slow step or a hang, grouped by the frame in which they are."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import SpanKind

from ..report.text import format_count, format_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ..trace.context import EventRecord

MAX_GROUPS = 4
MAX_NAMED = 4
"""Ranks of a group that are named; of more, their number is."""

STACK = "stack"
OPEN_KINDS = frozenset({"lost", "stalled"})
P2P = frozenset({SpanKind.PP_SEND.value, SpanKind.PP_RECV.value})


class StackPlace(StrEnum):
    """In what a rank is; the value is its text."""

    COLLECTIVE = "in the collective"
    OTHER_COLLECTIVE = "in another collective"
    DATA_LOADER = "in the data loader"
    STORAGE = "in storage"
    DRIVER = "in the driver"
    NEVER_JOINED = "never joined"
    """It is in none of these: in its own code."""


FRAMES: tuple[tuple[StackPlace, re.Pattern[str]], ...] = (
    (
        StackPlace.STORAGE,
        re.compile(
            r"/torch/(?:serialization|distributed/checkpoint/\w+)\.py|/(?:shutil|pickle|fsspec/\S*"
            r"|h5py/\S*|safetensors/\S*|s3fs/\S*|boto\w*/\S*|zarr/\S*|filelock/\S*"
            r"|huggingface_hub/\S*)(?:\.py)?:|\b(?:fsync|copyfile)\b"
        ),
    ),
    (
        StackPlace.DATA_LOADER,
        re.compile(r"/torch/utils/data/|/(?:webdataset|datasets|streaming|litdata|tokenizers)/"),
    ),
    (
        StackPlace.COLLECTIVE,
        re.compile(
            r"/torch/distributed/(?!checkpoint|run|launch|elastic|tensor/(?!_collective))"
            r"|/deepspeed/comm/|/torch/nn/parallel/distributed\.py:\d+ \S*_sync_"
            r"|/megatron/core/(?:pipeline_parallel/p2p_communication"
            r"|distributed/param_and_grad_buffer)\.py|/horovod/"
        ),
    ),
    (
        StackPlace.DRIVER,
        re.compile(
            r"/torch/(?:cuda|xpu|mps|_C)/|/torch_npu/|/torch/amp/grad_scaler\.py"
            r"|/triton/(?:runtime|backends)/|\bsynchronize$"
        ),
    ),
)
"""Places by the frames of libraries, in the order of search within a frame; the innermost frame
that belongs to one counts. Operators of a DTensor compute, and are in none of them. Source: the
modules of torch and of libraries for storage, and dumps of hung jobs in public issues
(tests/analysis/hosts/test_real_stacks.py)."""

ENGINE = re.compile(
    r"/torch/autograd/(?:graph|__init__|function)\.py|/torch/_tensor\.py:\d+ \S*backward$"
)
"""Frames in which a main thread waits for the threads of autograd, which run a backward on a
device."""

BOOTSTRAP = re.compile(r"\b_bootstrap$")
"""Outermost frame of a thread that Python began; threads of C++ code have none."""

DRIVER_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/davinci", "/dev/accel")
NO_STORAGE = ("/dev/", "/proc/", "/sys/", "anon_inode:", "socket:", "pipe:")
PAGE_FAULT = "page fault"

KIND_PLACES = {
    SpanKind.DATA.value: StackPlace.DATA_LOADER,
    SpanKind.CHECKPOINT.value: StackPlace.STORAGE,
}
"""Places by the kind of an open span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackGroup:
    """Ranks whose main threads are in the same frame."""

    ranks: tuple[int, ...]
    place: StackPlace
    frame: str
    """Line of the job's own code, or the innermost of a library; "" if it is unknown."""

    call: str = ""
    """System call on a file in which all of them are: "openat /data/shard-17.tar"; else ""."""

    def __str__(self) -> str:
        """Write it: "47 ranks in the collective at train.py:70 main"."""
        num = len(self.ranks)
        who = format_ranks(self.ranks) if num <= MAX_NAMED else format_count(num, "rank")
        where = "" if self.place is StackPlace.NEVER_JOINED else f" {self.place.value}"
        call = f" ({self.call})" if self.call else ""
        return f"{who}{where}{call}{f' at {self.frame}' if self.frame else ''}"


def group_stacks(
    events: Iterable[EventRecord], *, epoch: int, steps: tuple[int, int] | None
) -> tuple[StackGroup, ...]:
    """Return the newest stack of each rank, those alike together, the largest group first.

    Args:
        steps: First and last step of the stacks; None: any.
    """
    newest: dict[int, EventRecord] = {}
    for event in events:
        if event.kind != STACK or event.epoch != epoch or event.rank < 0:
            continue
        step = event.data.get("step")
        if steps is None or (isinstance(step, int) and steps[0] <= step <= steps[1]):
            newest[event.rank] = event
    alike: dict[tuple[StackPlace, str], dict[int, str]] = defaultdict(dict)
    for rank, event in newest.items():
        frames, call = read_main_frames(event.data), read_call(event.data)
        frame = event.place or (frames[0] if frames else "")
        path, mark, rest = frame.rpartition(":")
        short = f"{'/'.join(path.split('/')[-2:])}{mark}{rest}"  # "project/train.py:70 main"
        alike[find_place(frames, call), short][rank] = call
    groups = (
        StackGroup(
            ranks=tuple(sorted(calls)),
            place=place,
            frame=frame,
            call=next(iter(calls.values())) if len({*calls.values()}) == 1 else "",
        )
        for (place, frame), calls in alike.items()
    )
    return tuple(sorted(groups, key=lambda group: (-len(group.ranks), group.ranks)))


def describe_groups(groups: Collection[StackGroup]) -> str:
    """Write the groups, those beyond `MAX_GROUPS` as a number; "" if there is none."""
    shown = [str(group) for group in list(groups)[:MAX_GROUPS]]
    rest = sum(len(group.ranks) for group in list(groups)[MAX_GROUPS:])
    return "; ".join([*shown, *([f"{format_count(rest, 'other rank')} elsewhere"] if rest else [])])


def read_main_frames(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the frames of the main thread in an event's data, the innermost first.

    If it waits for a backward on a device, those of the thread that runs it come before them, if
    that is in Python code: a hook that reduces gradients.
    """
    threads: Any = data.get("threads")
    stacks = [_frames(thread) for thread in threads] if isinstance(threads, list) else []
    main = stacks[0] if stacks else ()
    if main and ENGINE.search(main[0]):
        for frames in stacks[1:]:
            if frames and not BOOTSTRAP.search(frames[-1]):
                return (*frames, *main)
    return main


def _frames(thread: Any) -> tuple[str, ...]:  # noqa: ANN401  # any JSON value
    frames = thread.get("frames") if isinstance(thread, dict) else None
    return tuple(map(str, frames)) if isinstance(frames, list) else ()


def read_call(data: Mapping[str, Any]) -> str:
    """Return the system call in an event's data in which the main thread was; "" if none is."""
    threads = data.get("threads")
    main = threads[0] if isinstance(threads, list) and threads else None
    call = main.get("call") if isinstance(main, dict) else None
    return call if isinstance(call, str) else ""


def find_place(frames: Iterable[str], call: str = "") -> StackPlace:
    """Return in what a stack is: by its system call, else its innermost frame of a known library.

    Inside a collective, the system call is the library's own.
    """
    place = _place_of_frames(tuple(frames))
    return place if place is StackPlace.COLLECTIVE else _place_of_call(call) or place


@lru_cache(maxsize=1024)
def _place_of_frames(frames: tuple[str, ...]) -> StackPlace:
    """Return the place of the innermost frame of a known library; most ranks have the same."""
    return next(
        (place for frame in frames for place, pattern in FRAMES if pattern.search(frame)),
        StackPlace.NEVER_JOINED,
    )


def _place_of_call(call: str) -> StackPlace | None:
    """Return in what a system call on a file is; None if its file is neither storage nor device."""
    _, _, file = call.partition(" ")
    if file.startswith(DRIVER_FILES):
        return StackPlace.DRIVER
    is_file = bool(file) and not file.startswith(NO_STORAGE)
    return StackPlace.STORAGE if call == PAGE_FAULT or is_file else None


def classify_hang(
    ranks: Collection[int],
    events: Iterable[EventRecord],
    *,
    epoch: int,
    steps: tuple[int, int] | None,
) -> StackPlace | None:
    """Return in what the named ranks of a hang are; None if nothing is known of them.

    If none is named, all that are blocked are in collectives that do not end.

    A communication that a rank's tracer had open when it stalled or was lost comes first. "The"
    collective is the one in which most ranks are. Then its stack decides, if it is in a known
    library or call, and then an open read of input or checkpoint: the innermost is the most exact.
    """
    events = [event for event in events if event.epoch == epoch]
    opened: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event.kind in OPEN_KINDS:
            opened[event.rank] = event.open_spans
    inside = {rank: found for rank, entries in opened.items() if (found := _collective(entries))}
    common = Counter(inside.values()).most_common(1)
    places = []
    if not ranks:
        return StackPlace.COLLECTIVE if inside else None
    groups = group_stacks(
        (event for event in events if event.rank in ranks),
        epoch=epoch,
        steps=None if steps is None else (steps[0], 1 << 31),
    )
    of_stack = {rank: group.place for group in groups for rank in group.ranks}
    for rank in ranks:
        kinds = [str(entry.get("kind")) for entry in opened.get(rank, ())]
        stack = of_stack.get(rank)
        if stack is StackPlace.COLLECTIVE and common and rank not in inside:
            stack = StackPlace.OTHER_COLLECTIVE  # of which nothing was recorded
        known = [KIND_PLACES[kind] for kind in reversed(kinds) if kind in KIND_PLACES]
        if stack is not None and stack is not StackPlace.NEVER_JOINED:
            known = [stack]
        if rank in inside and common:
            is_common = inside[rank] == common[0][0]
            known = [StackPlace.COLLECTIVE if is_common else StackPlace.OTHER_COLLECTIVE]
        is_missing = stack is not None or rank in opened or common
        place = known[0] if known else StackPlace.NEVER_JOINED if is_missing else None
        places += [place] if place is not None else []
    return Counter(places).most_common(1)[0][0] if places else None


def _collective(entries: Iterable[Mapping[str, Any]]) -> tuple[str, int, str] | None:
    """Return group, number and name of the innermost open communication; None if there is none.

    The two sides of a p2p have one name.
    """
    for entry in reversed(list(entries)):
        kind, seq = str(entry.get("kind")), entry.get("seq")
        if kind != SpanKind.WAIT and isinstance(seq, int) and seq >= 0:
            name = "p2p" if kind in P2P else str(entry.get("name"))
            return str(entry.get("group_id")), seq, name
    return None

"""Stacks of ranks in a slow step or a hang, grouped by the frame in which they are."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import COMM_KINDS, SpanKind

from ..report.text import format_count, format_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ..trace.context import EventRecord

MAX_GROUPS = 4
MAX_NAMED = 4
"""Ranks of a group that are named; of more, their number is."""

STACK = "stack"
OPEN_KINDS = frozenset({"lost", "stalled"})
COMM = frozenset(kind.value for kind in COMM_KINDS)


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
            r"|h5py/\S*|safetensors/\S*|s3fs/\S*|boto\w*/\S*|zarr/\S*)(?:\.py)?:|\b(?:fsync|copyfile)\b"
        ),
    ),
    (
        StackPlace.DATA_LOADER,
        re.compile(r"/torch/utils/data/|/(?:webdataset|datasets|streaming|litdata|tokenizers)/"),
    ),
    (
        StackPlace.COLLECTIVE,
        re.compile(r"/torch/distributed/(?!checkpoint|run|launch|elastic)|/deepspeed/comm/"),
    ),
    (
        StackPlace.DRIVER,
        re.compile(r"/torch/(?:cuda|xpu|_C)/|/triton/(?:runtime|backends)/|\bsynchronize$"),
    ),
)
"""Places by the frames of libraries, in the order of search within a frame; the innermost frame
that belongs to one counts. Source: the modules of torch and of libraries for storage."""

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

    def __str__(self) -> str:
        """Write it: "47 ranks in the collective at train.py:70 main"."""
        num = len(self.ranks)
        who = format_ranks(self.ranks) if num <= MAX_NAMED else format_count(num, "rank")
        where = "" if self.place is StackPlace.NEVER_JOINED else f" {self.place.value}"
        return f"{who}{where}{f' at {self.frame}' if self.frame else ''}"


def group_stacks(
    events: Iterable[EventRecord], *, epoch: int, steps: tuple[int, int] | None
) -> tuple[StackGroup, ...]:
    """Return the newest stack of each rank, those alike together, the largest group first.

    Args:
        events: Of the run.
        epoch: The epoch.
        steps: First and last step of the stacks; None: any.
    """
    newest: dict[int, EventRecord] = {}
    for event in events:
        if event.kind != STACK or event.epoch != epoch or event.rank < 0:
            continue
        step = event.data.get("step")
        if steps is None or (isinstance(step, int) and steps[0] <= step <= steps[1]):
            newest[event.rank] = event
    alike: dict[tuple[StackPlace, str], list[int]] = defaultdict(list)
    for rank, event in newest.items():
        frames = read_main_frames(event.data)
        frame = event.place or (frames[0] if frames else "")
        alike[find_place(frames), _short(frame)].append(rank)
    groups = (
        StackGroup(ranks=tuple(sorted(ranks)), place=place, frame=frame)
        for (place, frame), ranks in alike.items()
    )
    return tuple(sorted(groups, key=lambda group: (-len(group.ranks), group.ranks)))


def describe_groups(groups: Collection[StackGroup]) -> str:
    """Write the groups, those beyond `MAX_GROUPS` as a number; "" if there is none."""
    shown = [str(group) for group in list(groups)[:MAX_GROUPS]]
    rest = sum(len(group.ranks) for group in list(groups)[MAX_GROUPS:])
    return "; ".join([*shown, *([f"{format_count(rest, 'other rank')} elsewhere"] if rest else [])])


def read_main_frames(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the frames of the main thread in an event's data, the innermost first."""
    threads = data.get("threads")
    main = threads[0] if isinstance(threads, list) and threads else None
    frames = main.get("frames") if isinstance(main, dict) else None
    return tuple(map(str, frames)) if isinstance(frames, list) else ()


def find_place(frames: Iterable[str]) -> StackPlace:
    """Return in what a stack is, by its innermost frame of a known library."""
    for frame in frames:
        for place, pattern in FRAMES:
            if pattern.search(frame):
                return place
    return StackPlace.NEVER_JOINED


def classify_hang(
    ranks: Collection[int],
    events: Iterable[EventRecord],
    *,
    epoch: int,
    steps: tuple[int, int] | None,
) -> StackPlace | None:
    """Return in what the named ranks of a hang are; None if nothing is known of them.

    What a rank's tracer had open when it stalled or was lost comes first: a communication, a read
    of input or a checkpoint. "The" collective is the one in which most ranks are. Else its stack
    decides.
    """
    events = [event for event in events if event.epoch == epoch]
    opened: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        entries = event.data.get("open")
        if event.kind in OPEN_KINDS and isinstance(entries, list):
            opened[event.rank] = [entry for entry in entries if isinstance(entry, dict)]
    inside = {rank: found for rank, entries in opened.items() if (found := _collective(entries))}
    common = Counter(inside.values()).most_common(1)
    places = []
    groups = group_stacks(events, epoch=epoch, steps=None if steps is None else (steps[0], 1 << 31))
    of_stack = {rank: group.place for group in groups for rank in group.ranks}
    for rank in ranks:
        kinds = [str(entry.get("kind")) for entry in opened.get(rank, ())]
        known = next((KIND_PLACES[kind] for kind in reversed(kinds) if kind in KIND_PLACES), None)
        if rank in inside and common:
            is_common = inside[rank] == common[0][0]
            known = StackPlace.COLLECTIVE if is_common else StackPlace.OTHER_COLLECTIVE
        stack = of_stack.get(rank)
        if stack is StackPlace.COLLECTIVE and common and rank not in inside:
            stack = StackPlace.OTHER_COLLECTIVE  # of which nothing was recorded
        place = known or stack or (StackPlace.NEVER_JOINED if rank in opened or common else None)
        places += [place] if place is not None else []
    return Counter(places).most_common(1)[0][0] if places else None


def _collective(entries: Iterable[Mapping[str, Any]]) -> tuple[str, int] | None:
    """Return group and number of the innermost open communication; None if there is none."""
    for entry in reversed(list(entries)):
        seq = entry.get("seq")
        if str(entry.get("kind")) in COMM and isinstance(seq, int) and seq >= 0:
            return str(entry.get("group_id")), seq
    return None


def _short(frame: str) -> str:
    """Return a frame with the last two parts of its path: "project/train.py:70 main"."""
    path, mark, rest = frame.rpartition(":")
    return f"{'/'.join(path.split('/')[-2:])}{mark}{rest}"

"""Steps of a profile: the annotations that are steps of the job."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from ..errors import TraceError
from .kineto_events import OWN_PREFIXES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from .kineto_events import Annotation, Work

    Step = tuple[int, int, int]

STEP = re.compile(r"ProfilerStep#(\d{1,9})")
LAST_NUMBER = re.compile(r"(\d{1,9})\D*$")
WHOLE_TRACE = "all"
"""Value of ``--step-name`` by which the whole trace is one step."""

MAX_NAMES = 8
"""Annotations that an error lists."""


def find_steps(
    path: Path, annotations: Sequence[Annotation], works: Sequence[Work], *, step_name: str | None
) -> tuple[list[Step], bool]:
    """Find the steps of a file.

    Args:
        path: The file.
        annotations: Its annotations.
        works: What the trace computes and communicates.
        step_name: Name of the annotation of a step, or the begin of names that go on with a number;
            `WHOLE_TRACE`; None for ``ProfilerStep#N``, or the whole trace if no annotation repeats.

    Returns:
        Begin, end and number of each step, ascending and disjoint; whether the trace numbers them.

    Raises:
        TraceError: No annotation is known to be a step.
    """
    if step_name == WHOLE_TRACE:
        return _whole(works), False
    if step_name is not None:
        chosen = [each for each in annotations if each.name == step_name] or [
            each for each in annotations if each.name.startswith(step_name)
        ]
    else:
        chosen = [each for each in annotations if STEP.fullmatch(each.name)]
    if chosen:
        return _number(chosen)
    names = _repeated_names(annotations)
    if step_name is None and not names:
        return _whole(works), False
    missing = "ProfilerStep" if step_name is None else f"annotation that begins with {step_name!r}"
    reason = (
        f"has no {missing}: give --step-name with the annotation of a step, or"
        f" --step-name {WHOLE_TRACE} for one step over the whole trace"
    )
    if names:
        reason += f". Annotations that repeat: {', '.join(names)}"
    raise TraceError(path, reason)


def _number(annotations: Iterable[Annotation]) -> tuple[list[Step], bool]:
    """Return the outermost annotations as steps, numbered as their names are if those ascend."""
    outermost: list[Annotation] = []
    for each in sorted(annotations, key=lambda each: (each.start_ns, -each.end_ns)):
        if not outermost or each.start_ns >= outermost[-1].end_ns:
            outermost.append(each)
    matches = [LAST_NUMBER.search(each.name) for each in outermost]
    numbers = [int(match[1]) for match in matches if match]
    is_numbered = len(numbers) == len(outermost) and all(
        before < after for before, after in pairwise(numbers)
    )
    if not is_numbered or (len(numbers) == 1 and not STEP.fullmatch(outermost[0].name)):
        is_numbered, numbers = False, list(range(len(outermost)))
    return [
        (each.start_ns, each.end_ns, number)
        for each, number in zip(outermost, numbers, strict=True)
    ], is_numbered


def _repeated_names(annotations: Iterable[Annotation]) -> list[str]:
    """Return the names that repeat, or their begins up to a number, with their counts.

    Those that take the most time are first, as a step contains all else.
    """
    own = [each for each in annotations if each.is_own and not each.name.startswith(OWN_PREFIXES)]
    counts = Counter(each.name for each in own)
    names = {name: name if num > 1 else re.split(r"\d", name)[0] for name, num in counts.items()}
    lengths: Counter[str] = Counter()
    repeats: Counter[str] = Counter()
    for each in own:
        lengths[names[each.name]] += each.end_ns - each.start_ns
        repeats[names[each.name]] += 1
    longest = [name for name, _ in lengths.most_common() if name and repeats[name] > 1]
    texts = [f"{name} ({repeats[name]:,} times)" for name in longest[:MAX_NAMES]]
    more = len(longest) - len(texts)
    return [*texts, f"{more} more"] if more else texts


def _whole(works: Sequence[Work]) -> list[Step]:
    if not works:
        return []
    begin = min(min(each.launch_ns, each.start_ns) for each in works)
    return [(begin, max(each.end_ns for each in works) + 1, 0)]

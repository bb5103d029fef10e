"""Sums of the kernels of `torch.profiler` by step, phase and name."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from rankscope.tracer.span import NONE

from .kineto_trace import index_around

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankscope.tracer.span import SpanKind

    from .kineto_events import Work
    from .operator_costs import Cost

MAX_NAMES = 500
"""Names of kernels of one file that are kept, the busiest; a training step has 20 to 200."""

OTHER = "other"
"""Name of all further ones together."""

MAX_CHARS = 160
"""Of a kernel's name: longer ones lose what is deepest in their templates first."""

COMPUTE, COMMUNICATION, COPY = "compute", "communication", "copy"
COPIES = frozenset({"gpu_memcpy", "gpu_memset"})
NOISE = re.compile(r"\(anonymous namespace\)::|<unnamed>::|\bat::native::|^(?:void|static) ")


class KernelKey(NamedTuple):
    """The launches of which a row is the sum."""

    step: int
    phase: str
    """forward, backward or optimizer."""

    stream: str
    """compute, communication or copy."""

    name: str


@dataclass(slots=True)
class KernelSum:
    """Launches of one kernel in one phase of a step."""

    num: int
    total_ns: int
    max_ns: int
    flops: int | None
    """None if that of any launch is unknown, as are the bytes."""

    num_bytes: int | None
    dtype: str
    num_names: int = 1
    """Different names in it: more than one of `OTHER` alone."""

    def plus(self, other: KernelSum, *, num_names: int = 1) -> KernelSum:
        """Return the sum of both."""
        return KernelSum(
            num=self.num + other.num,
            total_ns=self.total_ns + other.total_ns,
            max_ns=max(self.max_ns, other.max_ns),
            flops=_sum(self.flops, other.flops),
            num_bytes=_sum(self.num_bytes, other.num_bytes),
            dtype=self.dtype if self.dtype == other.dtype else "",
            num_names=num_names,
        )


def sum_kernels(
    works: Sequence[Work],
    phases: Sequence[tuple[int, SpanKind] | None],
    *,
    comm: frozenset[int],
    costs: Mapping[str, Sequence[tuple[int, int, Cost]]],
) -> list[dict[str, Any]]:
    """Return the lines of ``kernels.jsonl``: one for each step, phase, stream and name.

    Args:
        works: Kernels of the device, or operators of the processor.
        phases: Step and phase of each; None outside the steps.
        comm: Places of those that are communication.
        costs: Begin, end and work of operators by thread. It counts for the longest kernel that
            was launched in the operator: old profiles have no other link between the two.
    """
    cost_of = _place_costs(works, comm, costs)
    sums: dict[KernelKey, KernelSum] = {}
    names: dict[str, str] = {}
    for place, (work, phase) in enumerate(zip(works, phases, strict=True)):
        if phase is None:
            continue
        full, length = work.event["name"], _length(work)
        is_copy = work.event["cat"] in COPIES
        if full not in names:
            names[full] = full if is_copy else shorten_name(full)
        stream = COMMUNICATION if place in comm else COPY if is_copy else COMPUTE
        key = KernelKey(phase[0], str(phase[1]), stream, names[full])
        launch = KernelSum(1, length, length, *cost_of.get(place, (None, None, "")))
        sums[key] = sums[key].plus(launch) if key in sums else launch
    columns = [column.name for column in fields(KernelSum)]
    return [
        {**key._asdict(), **{name: getattr(row, name) for name in columns}}
        for key, row in sorted(_limit_names(sums).items())
    ]


def _place_costs(
    works: Sequence[Work],
    comm: frozenset[int],
    costs: Mapping[str, Sequence[tuple[int, int, Cost]]],
) -> dict[int, Cost]:
    """Return the work of the operators by the places of their longest kernels."""
    longest: dict[tuple[str, int], int] = {}
    for place, work in enumerate(works):
        index = index_around(costs.get(work.thread, ()), work.launch_ns)
        if index == NONE or place in comm:
            continue
        before = longest.setdefault((work.thread, index), place)
        if _length(work) > _length(works[before]):
            longest[work.thread, index] = place
    return {place: costs[thread][index][2] for (thread, index), place in longest.items()}


def shorten_name(full: str) -> str:
    """Return the name of a kernel without return type, parameters and torch's namespaces.

    If it still has more than `MAX_CHARS`, the arguments of its innermost templates are left out,
    level by level, and a hash of the whole keeps it distinct.
    """
    text = NOISE.sub("", full)
    depths = _depths(text)
    begin = next((at for at, char in enumerate(text) if char == "(" and not depths[at]), 0)
    if begin and text[begin - 1] != " ":
        text = text[:begin]
    if len(text) <= MAX_CHARS:
        return text
    suffix = f"~{blake2b(full.encode('utf-8', 'replace'), digest_size=4).hexdigest()}"
    depths = _depths(text)
    kept = text
    for level in range(max(depths), 0, -1):
        kept = "".join(
            char if depth < level else "<…>" if depth == level and char == "<" else ""
            for char, depth in zip(text, depths, strict=True)
        )
        if len(kept) + len(suffix) <= MAX_CHARS:
            break
    return kept[: MAX_CHARS - len(suffix)] + suffix


def _depths(text: str) -> list[int]:
    """Return in how many templates each character is; the brackets are in their own."""
    depths, depth = [], 0
    for at, char in enumerate(text):
        is_arrow = char == ">" and text[at - 1 : at] == "-"
        depth += char == "<"
        depths.append(depth)
        depth -= char == ">" and depth > 0 and not is_arrow
    return depths


def _limit_names(sums: dict[KernelKey, KernelSum]) -> dict[KernelKey, KernelSum]:
    """Return the sums with at most `MAX_NAMES` names; the others of each phase are one row."""
    totals: Counter[str] = Counter()
    for key, row in sums.items():
        totals[key.name] += row.total_ns
    kept = {name for name, _ in totals.most_common(MAX_NAMES)}
    limited: dict[KernelKey, KernelSum] = {}
    for key, row in sums.items():
        place = key if key.name in kept else key._replace(name=OTHER)
        before = limited.get(place)
        limited[place] = row if before is None else before.plus(row, num_names=before.num_names + 1)
    return limited


def _length(work: Work) -> int:
    return work.end_ns - work.start_ns


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other

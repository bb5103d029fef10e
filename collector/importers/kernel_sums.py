"""Sums of the kernels of `torch.profiler` by step, phase and name."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rankscope.tracer.span import NONE

from .kineto_compute import PHASE_KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .kineto_compute import Phases
    from .kineto_reader import RankTrace, WorkTable
    from .operator_costs import Cost

MAX_NAMES = 500
"""Names of kernels of one file that are kept, the busiest; a training step has 20 to 200."""

OTHER = "other"
"""Name of all further ones together."""

MAX_CHARS = 160
"""Of a kernel's name: longer ones lose what is deepest in their templates first."""

STREAMS = COMPUTE, COMMUNICATION, COPY = "compute", "communication", "copy"
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


class KernelSum(NamedTuple):
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
            flops=_total((self.flops, other.flops)),
            num_bytes=_total((self.num_bytes, other.num_bytes)),
            dtype=self.dtype if self.dtype == other.dtype else "",
            num_names=num_names,
        )


def sum_kernels(trace: RankTrace, table: WorkTable, phases: Phases) -> list[dict[str, Any]]:
    """Return the lines of ``kernels.jsonl``: one for each step, phase, stream and name.

    The names are those of kernels of the device, or of operators of the processor.
    """
    inside = np.flatnonzero(phases.step != NONE)
    if not len(inside):
        return []
    is_copy = np.array([work.event["cat"] in COPIES for work in table.works], dtype=np.bool_)
    stream = np.where(table.is_comm, STREAMS.index(COMMUNICATION), is_copy * STREAMS.index(COPY))
    places: dict[tuple[str, bool], int] = {}
    full_names = zip((work.event["name"] for work in table.works), is_copy.tolist(), strict=True)
    name = np.array([places.setdefault(key, len(places)) for key in full_names])
    names = [full if copies else shorten_name(full) for full, copies in places]
    shape = len(trace.steps), len(PHASE_KINDS), len(STREAMS), len(names)
    columns = (column[inside] for column in (*phases, stream, name))
    cells, cell = np.unique(np.ravel_multi_index(tuple(columns), shape), return_inverse=True)
    order = np.argsort(cell, kind="stable")
    first = np.searchsorted(cell[order], np.arange(len(cells)))
    length = (table.end - table.start)[inside][order]
    costs: dict[int, list[Cost]] = defaultdict(list)
    for row, cost in _place_costs(trace, table, ~table.is_comm & ~is_copy).items():
        if phases.step[row] != NONE:
            costs[int(cell[np.searchsorted(inside, row)])].append(cost)
    sums: dict[KernelKey, KernelSum] = {}
    for place, (step, kind, of_stream, of_name, num, total_ns, max_ns) in enumerate(
        zip(
            *(column.tolist() for column in np.unravel_index(cells, shape)),
            np.diff(first, append=len(cell)).tolist(),
            np.add.reduceat(length, first).tolist(),
            np.maximum.reduceat(length, first).tolist(),
            strict=True,
        )
    ):
        number, phase = trace.steps[step][2], str(PHASE_KINDS[kind])
        key = KernelKey(number, phase, STREAMS[of_stream], names[of_name])
        own = KernelSum(num, total_ns, max_ns, *_add_costs(costs[place], num))
        sums[key] = sums[key].plus(own) if key in sums else own
    return [{**key._asdict(), **own._asdict()} for key, own in sorted(_limit_names(sums).items())]


def _place_costs(
    trace: RankTrace, table: WorkTable, is_kernel: NDArray[np.bool_]
) -> dict[int, Cost]:
    """Return the work of the operators by the rows of the kernels that do it.

    It is done by the longest kernel that was launched in the operator, or by all of them in the
    proportion of their times. Old profiles have no other link between the two.
    """
    around = table.find_around(trace.costs, table.launch)
    rows_of: dict[tuple[str, int], list[int]] = defaultdict(list)
    for row in np.flatnonzero((around != NONE) & is_kernel).tolist():
        rows_of[table.works[row].thread, int(around[row])].append(row)
    length_ns = (table.end - table.start).tolist()
    placed: dict[int, Cost] = {}
    for (thread, index), rows in rows_of.items():
        cost = trace.costs[thread][index][2]
        longest = max(rows, key=length_ns.__getitem__)
        if not cost.is_shared:
            placed[longest] = cost
            continue
        whole_ns = sum(length_ns[row] for row in rows)
        for row in rows if whole_ns else ():
            placed[row] = cost.share(length_ns[row], whole_ns)
    return placed


def _add_costs(costs: Sequence[Cost], num: int) -> tuple[int | None, int | None, str]:
    """Return the work of some launches; what is unknown of any of them is unknown of all."""
    if len(costs) < num:
        return None, None, ""
    dtypes = {cost.dtype for cost in costs}
    return (
        _total([cost.flops for cost in costs]),
        _total([cost.num_bytes for cost in costs]),
        dtypes.pop() if len(dtypes) == 1 else "",
    )


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


def _total(numbers: Sequence[int | None]) -> int | None:
    return None if None in numbers else sum(filter(None, numbers))

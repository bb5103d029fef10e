"""Bars of one step: the spans of every rank, with wait and transfer of communication."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rankscope.analysis.drawing.raster import NUM_BINS, find_unfinished, measure_areas
from rankscope.analysis.drawing.rows import place_spans
from rankscope.analysis.report.text import format_bytes, format_duration
from rankscope.tracer.span import KINDS, NONE, NS_PER_MS, SpanFlag, SpanKind

from ..text import escape, format_place
from ..theme import CLEAR, INK, KIND_COLORS, rgba
from .timeline_axes import (
    BELOW,
    NO_MARKS,
    TOP,
    RowStyle,
    bar_places,
    legend_entries,
    not_loaded,
    path_trace,
    selection_traces,
    step_layout,
)
from .timeline_canvas import HATCHED, PALE, SOLID, Bars

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rankscope.analysis.drawing.raster import KindCells, StepRaster, Viewport
    from rankscope.analysis.drawing.rows import Lanes, RowLayout
    from rankscope.analysis.drawing.timeline import StepTimeline

    from .timeline_axes import Marks

_MAX_TICKS = 64
_MIN_HATCHED = 10
"""Pixels of a lane's height from which its hatching shows as lines: in a thinner one it vanishes or
makes a moire, so waits are pale there."""

EMPTY = 0
"""Shade of a cell in which nothing was."""

_HALF = 0.5
_MIN_HEIGHT = 260
_MAX_HEIGHT = 510
"""As high as a laptop's screen has room for: 16 ranks are seen at once."""

_PIXELS_PER_RANK = 62
_LEAST_PER_RANK = 22
"""Readable height of a row with two lanes: the page scrolls rather than makes rows thinner."""

_AROUND = TOP + BELOW

_FOLDED = 0.6
"""Height of a folded group's bars, in rows."""

_NESTED_SHRINK = 0.62
_MAX_NESTING = 3
_FLAGS = (
    (int(SpanFlag.OPEN), "still open when last seen"),
    (int(SpanFlag.ERROR), "ended by an exception"),
)


def timeline_figure(
    timeline: StepTimeline,
    rows: RowLayout,
    marks: Marks = NO_MARKS,
    *,
    viewport: Viewport | None = None,
    is_whole: bool = True,
) -> tuple[dict[str, Any], list[Bars]]:
    """Draw every span of a step as a bar, in milliseconds since the step's first span.

    Each rank has a row with one lane for each track, compute above communication. If the wait of a
    communication span is known, its wait is hatched and pale, its transfer solid. A communication
    that has not ended, or has failed, is a wait. A folded group has one row, of what most of its
    ranks do.

    Args:
        timeline: The step, or the spans of a viewport.
        viewport: It fills the figure; None: the whole step.
        is_whole: Whether the spans are the whole step's; else all around the viewport is drawn as
            not loaded.

    Returns:
        Axes, legend and marks as a plain document (plotly's own objects check and copy every
        value, which took as long as everything else), and the bars in the order of drawing.
    """
    num_rows = len(rows.blocks)
    lanes = place_spans(timeline, rows)
    height = min(max(_PIXELS_PER_RANK * num_rows + _AROUND, _MIN_HEIGHT), _MAX_HEIGHT)
    height = max(height, _LEAST_PER_RANK * num_rows + _AROUND)
    lane_px = float(np.median(lanes.height)) * (height - _AROUND) / max(num_rows, 1)
    waits = _Waits(find_waits(timeline), is_hatched=lane_px >= _MIN_HATCHED)
    outer_first = np.argsort(timeline.spans.depth, kind="stable")
    outer_first = outer_first[np.isin(timeline.spans.rank, rows.single_ranks)[outer_first]]
    bars: list[Bars] = []
    for code in np.unique(timeline.spans.kind[outer_first]).tolist():
        of_kind = outer_first[timeline.spans.kind[outer_first] == code]
        bars += _kind_bars(timeline, lanes, of_kind, waits)
    bars += _folded_bars(timeline, viewport, rows)
    traces = legend_entries(dict.fromkeys(drawn.kind for drawn in bars))
    if (waits.wait_ns[outer_first] > 0).any():
        traces.append(_waiting_entry(is_hatched=waits.is_hatched))
    if marks.path is not None:
        traces.append(path_trace(marks.path, bar_places(timeline, rows, lanes)))
    if marks.span is not None:
        traces += selection_traces(timeline, marks, rows=rows, lanes=lanes)
    style = RowStyle(
        height=height,
        max_ticks=_MAX_TICKS,
        separator="rgba(134,142,150,0.45)",
        name_offset=0,
        name_px=0,
        name_place={"yanchor": "middle", "align": "left"},
    )
    layout = step_layout(timeline, rows, marks, style)
    if viewport is not None:
        begin_ms, end_ms = viewport.begin_ns / NS_PER_MS, viewport.end_ns / NS_PER_MS
        layout["xaxis"]["range"] = [begin_ms, end_ms]
        if is_whole:
            ends = np.cumsum([len(block) for block in rows.blocks])
            shown = (viewport.first_row, viewport.end_row - 1)
            first, last = np.searchsorted(ends, shown, side="right").tolist()
            layout["yaxis"]["range"] = [last + 0.5, first - 0.5]
        else:
            layout["shapes"] += not_loaded(timeline, (begin_ms, end_ms), num_lines=num_rows)
    return {"data": traces, "layout": layout}, bars


def _waiting_entry(*, is_hatched: bool) -> dict[str, Any]:
    marker: dict[str, Any] = {"color": rgba(INK, PALE), "line": {"width": 0}}
    if is_hatched:
        pattern = {"shape": "/", "size": 5, "solidity": 0.25, "fgcolor": INK, "bgcolor": CLEAR}
        marker = {"color": INK, "line": {"width": 1, "color": INK}, "pattern": pattern}
    return {
        "type": "bar",
        "name": f"{'hatched' if is_hatched else 'pale'}: waiting",
        "x": [None],
        "y": [None],
        "marker": marker,
        "hoverinfo": "skip",
    }


def _folded_bars(timeline: StepTimeline, viewport: Viewport | None, rows: RowLayout) -> list[Bars]:
    """Return what most ranks of each folded group do, as bars of equal cells side by side."""
    folded = [row for row, block in enumerate(rows.blocks) if len(block) > 1]
    if not folded:
        return []
    begin_ns, end_ns = 0, timeline.end_ns - timeline.begin_ns
    if viewport is not None:
        begin_ns, end_ns = viewport.begin_ns, min(viewport.end_ns, end_ns)
    inside = replace(
        timeline, begin_ns=timeline.begin_ns + begin_ns, end_ns=timeline.begin_ns + end_ns
    )
    raster = measure_areas(inside, [rows.blocks[row] for row in folded], num_bins=NUM_BINS).raster()
    shades = raster_shades(raster)
    edges_ms = (raster.edges_ns + begin_ns) / NS_PER_MS
    runs: dict[int, list[tuple[float, float, int]]] = {}
    for row, shade in zip(folded, shades, strict=True):
        begins = np.flatnonzero(np.diff(shade, prepend=-1))
        for first, end in itertools.pairwise([*begins.tolist(), len(shade)]):
            runs.setdefault(int(shade[first]), []).append((edges_ms[first], edges_ms[end], row))
    runs.pop(EMPTY, None)
    bars = []
    for shade, cells in sorted(runs.items()):
        kind, is_full = KINDS[(shade - 1) // 2], (shade - 1) % 2
        most = f"{kind.value}, {'most of' if is_full else 'less than half of'} {{}} ranks"
        begin_ms, end_ms, center = (np.array(one, float) for one in zip(*cells, strict=True))
        bars.append(
            Bars(
                kind=kind,
                begin_ms=begin_ms,
                length_ms=end_ms - begin_ms,
                center=center,
                height=np.full(len(cells), _FOLDED),
                texts=[most.format(len(rows.blocks[row])) for _, _, row in cells],
                color=rgba(KIND_COLORS[kind], 1 if is_full else PALE),
            )
        )
    return bars


def raster_shades(raster: StepRaster, *, num_lines: int = 1) -> NDArray[np.uint8]:
    """Return the shades of all lines, shape (lines, bins)."""
    compute, comm = _shade(raster.compute), _shade(raster.comm)
    if num_lines == 1:
        is_free = (raster.compute.kind < 0) | (raster.compute.kind == KINDS.index(SpanKind.WAIT))
        return np.where(is_free & (comm != EMPTY), comm, compute)
    return np.stack([compute, comm], axis=1).reshape(-1, compute.shape[1])


def _shade(cells: KindCells) -> NDArray[np.uint8]:
    """Number the shades: after `EMPTY` two for each kind, the pale one first."""
    is_full = cells.filled_ratio >= _HALF
    shade = 1 + 2 * cells.kind.astype(np.int16) + is_full
    return np.where(cells.kind < 0, EMPTY, shade).astype(np.uint8)


class _Waits(NamedTuple):
    wait_ns: NDArray[np.int64]
    """Shape (spans,): as of `find_waits`."""

    is_hatched: bool
    """Else pale: in thin lanes."""

    def look(self, kind: SpanKind) -> dict[str, str]:
        color = KIND_COLORS[kind]
        if self.is_hatched:
            return {"look": HATCHED, "color": color}
        # A blocked thread is drawn over the span around it, which would shine through.
        return {"look": SOLID, "color": color if kind is SpanKind.WAIT else rgba(color, PALE)}


def find_waits(timeline: StepTimeline) -> NDArray[np.int64]:
    """Return how long each span waits from its begin on, shape (spans,); 0 if it is unknown.

    A communication that was still open when last seen, or that failed, had waited all the time, and
    so had a ``wait`` whose communication is unknown. Any other ``wait`` waits until the last member
    of its communication arrived, and then for the transfer.
    """
    spans = timeline.spans
    is_split = (timeline.wait_ns > 0) & (timeline.wait_ns <= spans.duration_ns)
    waits: NDArray[np.int64] = np.where(is_split, timeline.wait_ns, 0)
    whole = find_unfinished(timeline)
    is_wait = spans.kind == KINDS.index(SpanKind.WAIT)
    waits = np.where(is_wait, timeline.blocked_ns, waits)
    return np.where(whole | (waits < 0), spans.duration_ns, waits)


def hover_texts(timeline: StepTimeline) -> list[str]:
    """Return the text of every span under the pointer, with line breaks; the first line is bold.

    Quantities that are unknown or mean nothing for the span are left out. Names are escaped
    (`..text.escape`), but not for HTML.
    """
    spans = timeline.spans
    names = [escape(name) for name in spans.names]
    kinds = [kind.value for kind in KINDS]
    places = {
        rank: f"rank {rank} (PP {at.pp} · DP {at.dp} · TP {at.tp})"
        for rank, at in timeline.coords.items()
    }
    begin_ns = spans.start_ns - timeline.begin_ns
    columns = (
        spans.name, spans.kind, spans.microbatch, spans.rank, begin_ns, spans.duration_ns,
        np.maximum(timeline.wait_ns, timeline.blocked_ns), timeline.last_rank,
        np.where(timeline.blocked_ns < 0, timeline.transfer_ns,
                 spans.duration_ns - timeline.blocked_ns),
        spans.src_rank, spans.dst_rank, spans.num_bytes, spans.flags,
    )  # fmt: skip
    texts = []
    for (
        name, kind, microbatch, rank, begin, duration, wait, last, transfer, src, dst, size, flags,
    ) in zip(*(column.tolist() for column in columns), strict=True):  # fmt: skip
        lines = [
            names[name],
            kinds[kind] if microbatch == NONE else f"{kinds[kind]}, micro-batch {microbatch}",
            places.get(rank) or f"rank {rank}",
            f"duration {format_duration(duration)}, from {format_place(begin)}",
        ]
        if wait >= 0:
            cause = f" for rank {last}" if wait > 0 and last != rank else ""
            lines.append(f"wait {format_duration(wait)}{cause}")
            lines.append(f"transfer {format_duration(transfer)}")
        if src != NONE and dst != NONE:
            lines.append(f"rank {src} → rank {dst}")
        if size != NONE:
            lines.append(format_bytes(size))
        if flags:
            lines += [text for flag, text in _FLAGS if flags & flag]
        texts.append("\n".join(lines))
    return texts


def _kind_bars(
    timeline: StepTimeline,
    lanes: Lanes,
    own: NDArray[np.intp],
    waits: _Waits,
) -> list[Bars]:
    """Return the bars of one kind: whole spans and transfers solid, waits hatched."""
    spans = timeline.spans
    kind = KINDS[int(spans.kind[own[0]])]
    start = spans.start_ns[own] - timeline.begin_ns
    wait = waits.wait_ns[own]
    # A nested span is drawn inside the span around it, a blocked thread at full height. What is
    # nested in a span of another track is the outermost of its own.
    height = lanes.height[own]
    if kind is not SpanKind.WAIT:
        outermost = np.full(len(spans.tracks), _MAX_NESTING, dtype=spans.depth.dtype)
        np.minimum.at(outermost, spans.track, spans.depth)
        nesting = spans.depth[own] - outermost[spans.track[own]]
        height = height * np.power(_NESTED_SHRINK, np.minimum(nesting, _MAX_NESTING))

    def bars(
        chosen: NDArray[np.intp],
        start_ns: NDArray[np.int64],
        duration_ns: NDArray[np.int64],
        look: str = SOLID,
        color: str = "",
    ) -> Bars:
        shown = own[chosen]
        return Bars(
            kind=kind,
            begin_ms=start_ns[chosen] / NS_PER_MS,
            length_ms=duration_ns[chosen] / NS_PER_MS,
            center=lanes.center[shown],
            height=height[chosen],
            spans=shown.astype(np.int32),
            look=look,
            color=color,
        )

    rest = spans.duration_ns[own] - wait
    if kind is SpanKind.WAIT:
        found = []
        for code in np.unique(timeline.transfer_kind[own]).tolist():
            of_kind = np.flatnonzero((timeline.transfer_kind[own] == code) & (rest > 0))
            if code != NONE and len(of_kind):
                moving = bars(of_kind, start + wait, rest)
                found.append(replace(moving, kind=KINDS[code], of=kind))
    else:
        found = [bars(np.arange(len(own)), start + wait, rest)]
    if (waiting := np.flatnonzero(wait > 0)).size:
        found.append(bars(waiting, start, wait, **waits.look(kind)))
    return found

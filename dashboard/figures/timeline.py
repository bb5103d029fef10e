"""Bars of one step: the spans of every rank, with wait and transfer of communication."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rankscope.analysis.drawing.raster import NUM_BINS, find_unfinished, measure_areas
from rankscope.analysis.drawing.rows import arrange_rows, fold_groups, group_lines, row_order
from rankscope.analysis.report.text import MIN_AXIS_S, format_bytes, format_duration
from rankscope.tracer.span import KINDS, NONE, NS_PER_MS, NS_PER_S, SpanFlag, SpanKind

from ..text import cut_middle, escape, escape_for_plotly, format_place
from ..theme import CLEAR, INK, KIND_COLORS, base_layout, rgba
from .timeline_canvas import HATCHED, PALE, SOLID, Bars
from .timeline_marks import bar_places, path_trace, selection_traces

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from numpy.typing import NDArray

    from rankscope.analysis.drawing.raster import KindCells, StepRaster, Stretches, Viewport
    from rankscope.analysis.drawing.rows import Group, RankBlocks, RowOrder, Rows
    from rankscope.analysis.drawing.timeline import StepTimeline

MAX_GROUP_NAMES = 64
"""Names of groups that fit into the margin."""

_MAX_TICKS = 64
_MIN_HATCHED = 10
"""Pixels of a lane's height from which its hatching shows as lines: in a thinner one it vanishes or
makes a moire, so waits are pale there."""

_LETTER = 7.4
"""Pixels of a letter in the margin, on average."""

_MAX_NAME = 20
"""Letters of a group's name: on a phone, more would leave no room for the rows."""

_LEAST_MARGIN = 56
"""Pixels of the word "rank" and half of a label of times."""

VEIL = "rgba(134,142,150,0.62)"
"""Colour over what is not marked, of the same effect on white and on near-black."""

EMPTY = 0
"""Shade of a cell in which nothing was."""

_HALF = 0.5
NOT_LOADED = "rgba(134,142,150,0.25)"
_MIN_HEIGHT = 260
_MAX_HEIGHT = 860
_PIXELS_PER_RANK = 62
_LEAST_PER_RANK = 22
"""Readable height of a row with two lanes: the page scrolls rather than makes rows thinner."""

_FOLDED = 0.6
"""Height of a folded group's bars, in rows."""

_NESTED_SHRINK = 0.62
_MAX_NESTING = 3
_NAMES = {SpanKind.WAIT: "wait (thread blocked)"}
_FLAGS = (
    (int(SpanFlag.OPEN), "still open when last seen"),
    (int(SpanFlag.ERROR), "ended by an exception"),
)


def timeline_figure(  # noqa: PLR0913  # all that is in the address of a view
    timeline: StepTimeline,
    order: RowOrder,
    viewport: Viewport | None = None,
    ranks: tuple[int, ...] | None = None,
    marked: tuple[int, ...] = (),
    path: Stretches | None = None,
    folded: Collection[int] = (),
) -> tuple[dict[str, Any], list[Bars]]:
    """Draw every span of a step as a bar, in milliseconds since the step's first span.

    Each rank has a row with one lane for each track, compute above communication. If the wait of a
    communication span is known, its wait is hatched and pale, its transfer solid. A communication
    that has not ended, or has failed, is a wait. A folded group has one row, of what most of its
    ranks do.

    Args:
        timeline: The step, or the spans of a viewport.
        order: What the rows are grouped by.
        viewport: It fills the figure; None: the whole step.
        ranks: The viewport's ranks from the top, if only its spans are given: all around it is
            drawn as not loaded. None: the spans are the whole step's.
        marked: Ranks that are marked; if there are any, the others are dimmed.
        path: The critical path; None: it is not drawn.
        folded: Numbers of the groups that are folded.

    Returns:
        Axes, legend and marks as a plain document (plotly's own objects check and copy every
        value, which took as long as everything else), and the bars in the order of drawing.
    """
    blocks = bar_blocks(timeline, order, ranks, folded)
    rows = arrange_rows(timeline, order, blocks)
    num_rows = len(blocks)
    height = min(max(_PIXELS_PER_RANK * num_rows + _AROUND, _MIN_HEIGHT), _MAX_HEIGHT)
    height = max(height, _LEAST_PER_RANK * num_rows + _AROUND)
    lane = float(np.median(rows.height)) * (height - _AROUND) / max(num_rows, 1)
    waits = _Waits(find_waits(timeline), is_hatched=lane >= _MIN_HATCHED)
    outer_first = np.argsort(timeline.spans.depth, kind="stable")
    outer_first = outer_first[np.isin(timeline.spans.rank, single_ranks(blocks))[outer_first]]
    bars: list[Bars] = []
    for code in np.unique(timeline.spans.kind[outer_first]).tolist():
        own = outer_first[timeline.spans.kind[outer_first] == code]
        bars += _kind_bars(timeline, rows, own, waits)
    bars += _folded_bars(timeline, viewport, blocks)
    traces = legend_entries(dict.fromkeys(one.kind for one in bars))
    if (waits.wait_ns[outer_first] > 0).any():
        traces.append(_waiting_entry(is_hatched=waits.is_hatched))
    if path is not None:
        traces.append(path_trace(path, bar_places(timeline, rows)))
    traces += selection_traces()
    layout = _layout(timeline, rows, height, marked=marked, folded=folded)
    if viewport is not None:
        ends = (viewport.begin_ns, viewport.end_ns)
        layout["xaxis"]["range"] = [end / NS_PER_MS for end in ends]
        if ranks is None:
            first, last = lines_of_rows(blocks, viewport.first_row, viewport.end_row - 1)
            layout["yaxis"]["range"] = [last + 0.5, first - 0.5]
        else:
            loaded_ms = (viewport.begin_ns / NS_PER_MS, viewport.end_ns / NS_PER_MS)
            layout["shapes"] += not_loaded(loaded_ms, _length_ms(timeline), num_lines=num_rows)
    return {"data": traces, "layout": layout}, bars


def legend_entries(kinds: Iterable[SpanKind]) -> list[dict[str, Any]]:
    """Return an entry of the legend for each kind, as a trace without points."""
    return [
        {
            "type": "scatter",
            "name": _NAMES.get(kind, kind.value),
            "legendgroup": kind.value,  # the assets hide what belongs to an entry that is off
            "x": [None],
            "y": [None],
            "mode": "markers",
            "marker": {"symbol": "square", "size": 10, "color": KIND_COLORS[kind]},
            "hoverinfo": "skip",
        }
        for kind in kinds
    ]


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


def bar_blocks(
    timeline: StepTimeline,
    order: RowOrder,
    ranks: tuple[int, ...] | None,
    folded: Collection[int],
) -> RankBlocks:
    """Return the ranks of each row of a figure of bars, as of `timeline_figure`."""
    ranks = row_order(timeline, order) if ranks is None else ranks
    blocks = tuple((rank,) for rank in ranks)
    groups = group_lines(blocks, timeline.coords, order, timeline.hosts)
    return fold_groups(blocks, groups, folded)[0]


def single_ranks(blocks: RankBlocks) -> list[int]:
    """Return the ranks that have a row of their own."""
    return [block[0] for block in blocks if len(block) == 1]


def lines_of_rows(blocks: RankBlocks, *rows: int) -> list[int]:
    """Return the lines with the ranks of these places from the top."""
    ends = np.cumsum([len(block) for block in blocks])
    return [int(one) for one in np.searchsorted(ends, rows, side="right")]


def _folded_bars(
    timeline: StepTimeline, viewport: Viewport | None, blocks: RankBlocks
) -> list[Bars]:
    """Return what most ranks of each folded group do, as bars of equal cells side by side."""
    at = {block: line for line, block in enumerate(blocks) if len(block) > 1}
    if not at:
        return []
    begin_ns, end_ns = 0, timeline.end_ns - timeline.begin_ns
    if viewport is not None:
        begin_ns, end_ns = viewport.begin_ns, min(viewport.end_ns, end_ns)
    inside = replace(
        timeline, begin_ns=timeline.begin_ns + begin_ns, end_ns=timeline.begin_ns + end_ns
    )
    raster = measure_areas(inside, tuple(at), num_bins=NUM_BINS).raster()
    shades = raster_shades(raster)
    edges_ms = (raster.edges_ns + begin_ns) / NS_PER_MS
    runs: dict[int, list[tuple[float, float, int]]] = {}
    for line, shade in zip(at.values(), shades, strict=True):
        begins = np.flatnonzero(np.diff(shade, prepend=-1))
        for first, end in itertools.pairwise([*begins.tolist(), len(shade)]):
            runs.setdefault(int(shade[first]), []).append((edges_ms[first], edges_ms[end], line))
    runs.pop(EMPTY, None)
    bars = []
    for shade, found in sorted(runs.items()):
        kind, is_full = KINDS[(shade - 1) // 2], (shade - 1) % 2
        most = f"{kind.value}, {'most of' if is_full else 'less than half of'} {{}} ranks"
        begun, ended, lines = (np.array(column, np.float64) for column in zip(*found, strict=True))
        bars.append(
            Bars(
                kind=kind,
                begin_ms=begun,
                length_ms=ended - begun,
                center=lines,
                height=np.full(len(found), _FOLDED),
                texts=[most.format(len(blocks[line])) for _, _, line in found],
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
        """Return look and colour of a kind's waits."""
        color = KIND_COLORS[kind]
        if self.is_hatched:
            return {"look": HATCHED, "color": color}
        # A blocked thread is drawn over the span around it, which would shine through.
        return {"look": SOLID, "color": color if kind is SpanKind.WAIT else rgba(color, PALE)}


def find_waits(timeline: StepTimeline) -> NDArray[np.int64]:
    """Return how long each span waits from its begin on, shape (spans,); 0 if it is unknown.

    A communication that was still open when last seen, or that failed, had waited all the time.
    """
    spans = timeline.spans
    is_split = (timeline.wait_ns > 0) & (timeline.wait_ns <= spans.duration_ns)
    waits: NDArray[np.int64] = np.where(is_split, timeline.wait_ns, 0)
    return np.where(find_unfinished(timeline), spans.duration_ns, waits)


def not_loaded(
    loaded_ms: tuple[float, float], length_ms: float, *, num_lines: int
) -> list[dict[str, object]]:
    """Return shapes over what a figure of a viewport does not have, as plotly's shapes.

    White would mean that nothing happened there.

    Args:
        loaded_ms: Begin and end of the viewport, from the step's begin.
        length_ms: Length of the step.
        num_lines: Lines of the figure.
    """
    begin_ms, end_ms = loaded_ms
    beyond = 1e6  # further than a reader can zoom out
    boxes = (
        (0.0, begin_ms, -beyond, beyond),
        (end_ms, length_ms, -beyond, beyond),
        (begin_ms, end_ms, -beyond, -0.5),
        (begin_ms, end_ms, num_lines - 0.5, beyond),
    )
    return [
        {
            "type": "rect",
            "name": "not loaded",
            "x0": x0,
            "x1": x1,
            "y0": y0,
            "y1": y1,
            "xref": "x",
            "yref": "y",
            "fillcolor": NOT_LOADED,
            "line": {"width": 0},
            "layer": "below",
            "label": {"text": "not loaded yet", "font": {"color": INK}},
        }
        for x0, x1, y0, y1 in boxes
        if x1 > x0
    ]


def _length_ms(timeline: StepTimeline) -> float:
    return (timeline.end_ns - timeline.begin_ns) / NS_PER_MS


def left_margin(names: Iterable[str], ticks: Iterable[str]) -> int:
    """Return the width in pixels of a margin with names of groups beside labels of rows."""
    plain = (tick.removeprefix("<b>").removesuffix("</b>") for tick in ticks)
    letters = sum(max(map(len, texts), default=0) for texts in (names, plain))
    return max(round(letters * _LETTER) + 28, _LEAST_MARGIN)


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
        timeline.wait_ns, timeline.last_rank, timeline.transfer_ns,
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


def row_ticks(
    blocks: Sequence[tuple[int, ...]],
    marked: Iterable[int],
    *,
    max_ticks: int,
    folded_lines: Iterable[int] = (),
) -> tuple[list[int], list[str]]:
    """Return the labelled lines and their labels: evenly spaced ones, and marked ones in bold.

    Args:
        blocks: The ranks of each line, from the top.
        marked: Marked ranks.
        max_ticks: Labels that fit into the margin.
        folded_lines: Lines of folded groups, which are labelled with their number of ranks: all of
            them if there is room.
    """
    every = max(1, -(-len(blocks) // max_ticks))
    found = set(marked)
    bold = _lines_with(blocks, found)[:max_ticks]
    joined = list(folded_lines)
    sure = {*bold, *(joined if len(joined) <= max_ticks else ())}
    # A label beside one of these would be printed over it.
    plain = [
        row for row in range(0, len(blocks), every) if all(abs(row - one) >= every for one in sure)
    ]
    labels = {row: f"{blocks[row][0]}{'…' if len(blocks[row]) > 1 else ''}" for row in plain}
    labels |= {row: f"{len(blocks[row]):,} ranks" for row in joined if row in {*sure, *plain}}
    for row in bold:
        own = [rank for rank in blocks[row] if rank in found]
        labels[row] = f"<b>{own[0]}{'…' if len(own) > 1 else ''}</b>"
    ticks = sorted(labels)
    return ticks, [labels[row] for row in ticks]


def _lines_with(blocks: Sequence[tuple[int, ...]], found: set[int]) -> list[int]:
    if not found:
        return []
    return [row for row, block in enumerate(blocks) if not found.isdisjoint(block)]


def folded_lines(groups: Iterable[Group], folded: Collection[int]) -> list[int]:
    """Return the lines of folded groups."""
    return [group.line for group in groups if group.number in folded]


def dimmed(
    blocks: Sequence[tuple[int, ...]], marked: Iterable[int], lines: Sequence[int]
) -> list[dict[str, object]]:
    """Return a veil over the lines without marked ranks, as plotly's shapes.

    Nothing if no line has one, or all have.

    Args:
        blocks: The ranks of each block of lines, from the top.
        marked: Marked ranks.
        lines: First line of each block, and the number of all lines.
    """
    bright = _lines_with(blocks, set(marked))
    if not bright:
        return []
    borders = [-1, *bright, len(blocks)]
    return [
        {
            "type": "rect",
            "name": "not marked",
            "x0": 0,
            "x1": 1,
            "xref": "x domain",
            "y0": lines[above + 1] - 0.5,
            "y1": lines[below] - 0.5,
            "yref": "y",
            "fillcolor": VEIL,
            "line": {"width": 0},
            "layer": "above",
        }
        for above, below in itertools.pairwise(borders)
        if below > above + 1
    ]


def across_lines(heights: Iterable[float], line: dict[str, object]) -> list[dict[str, object]]:
    """Return lines across the figure, as plotly's shapes.

    The time of plotly's own ``add_hline`` grows with the square of their number.
    """
    return [
        {
            "type": "line",
            "x0": 0,
            "x1": 1,
            "xref": "x domain",
            "y0": height,
            "y1": height,
            "yref": "y",
            "line": line,
        }
        for height in heights
    ]


def group_names(
    groups: Sequence[Group],
    folded: Collection[int],
    heights: Sequence[float],
    *,
    min_lines: float = 0,
    **place: object,
) -> list[dict[str, object]]:
    """Return the names of groups in the left margin, as plotly's annotations.

    A click on one folds it. An annotation is named after its number and its ends, between which
    the assets keep it in view. Of more than `MAX_GROUP_NAMES` groups only evenly spaced ones are
    named.

    Args:
        groups: The groups.
        folded: Numbers of those that are folded.
        heights: Place of each group's name on the axis of the rows.
        min_lines: Lines between two names that are not printed over each other.
        place: Plotly's properties of the text's place.
    """
    every = max(1, -(-len(groups) // MAX_GROUP_NAMES))
    named: list[tuple[Group, float, float]] = []
    ends = (*heights, math.inf)[1:]
    for group, height, end in list(zip(groups, heights, ends, strict=True))[::every]:
        if not named or height - named[-1][1] >= min_lines:
            named.append((group, height, end))
    return [
        {
            "name": f"fold {group.number} {height:g} {end:g}",
            "text": group_text(group, folded),
            "captureevents": True,
            "hovertext": escape_for_plotly(group.name),
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "y": height,
            "yref": "y",
            "showarrow": False,
            **place,
        }
        for group, height, end in named
    ]


def group_text(group: Group, folded: Collection[int]) -> str:
    """Return the name of a group in the margin, with a sign of whether it is folded."""
    return f"{'▸' if group.number in folded else '▾'} <b>{escape_for_plotly(short_name(group))}</b>"


def short_name(group: Group) -> str:
    """Return the name of a group, without its middle if it is long: hosts differ at the end."""
    return cut_middle(escape(group.name), _MAX_NAME)


def _kind_bars(
    timeline: StepTimeline,
    rows: Rows,
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
    height = rows.height[own]
    if kind is not SpanKind.WAIT:
        outermost = np.full(len(spans.tracks), _MAX_NESTING, dtype=spans.depth.dtype)
        np.minimum.at(outermost, spans.track, spans.depth)
        nesting = spans.depth[own] - outermost[spans.track[own]]
        height = height * np.power(_NESTED_SHRINK, np.minimum(nesting, _MAX_NESTING))

    def bars(
        chosen: NDArray[np.intp],
        start_ns: NDArray[np.int64],
        duration_ns: NDArray[np.int64],
        **look: str,
    ) -> Bars:
        shown = own[chosen]
        return Bars(
            kind=kind,
            begin_ms=start_ns[chosen] / NS_PER_MS,
            length_ms=duration_ns[chosen] / NS_PER_MS,
            center=rows.center[shown],
            height=height[chosen],
            spans=shown.astype(np.int32),
            **look,
        )

    solid = waits.look(kind) if kind is SpanKind.WAIT else {}
    found = [bars(np.arange(len(own)), start + wait, spans.duration_ns[own] - wait, **solid)]
    if (waiting := np.flatnonzero(wait > 0)).size:
        found.append(bars(waiting, start, wait, **waits.look(kind)))
    return found


def _layout(
    timeline: StepTimeline,
    rows: Rows,
    height: int,
    *,
    marked: tuple[int, ...],
    folded: Collection[int],
) -> dict[str, Any]:
    zoom_key = f"{timeline.run} {timeline.epoch} {timeline.step}"
    layout = base_layout(height=height, zoom_key=zoom_key)
    layout["xaxis"].update(
        **time_axis(_length_ms(timeline)),
        range=[0, _length_ms(timeline)],
        showgrid=False,
    )
    ticks, labels = row_ticks(
        rows.blocks,
        marked,
        max_ticks=_MAX_TICKS,
        folded_lines=folded_lines(rows.groups, folded),
    )
    left = left_margin((f"▾ {short_name(group)}" for group in rows.groups), labels)
    num_rows = len(rows.blocks)
    layout["yaxis"].update(
        range=[num_rows - 0.5, -0.5],
        tickmode="array",
        ticklabeloverflow="allow",  # else plotly measures each label
        tickvals=ticks,
        ticktext=labels,
        showgrid=False,
        automargin=False,
    )
    line = {"color": "rgba(134,142,150,0.45)", "width": 1}
    layout["legend"].update(LEGEND_PLACE)
    layout.update(
        hovermode=False,
        dragmode="pan",
        margin={"l": left, "r": 16, "t": TOP, "b": 8},
        shapes=[
            *across_lines((group.line - 0.5 for group in rows.groups if group.line > 0), line),
            *dimmed(rows.blocks, marked, range(num_rows + 1)),
        ],
        annotations=[
            *group_names(
                rows.groups,
                folded,
                [group.line for group in rows.groups],
                yanchor="middle",
                align="left",
                xshift=6 - left,
            ),
            RANKS_TITLE,
        ],
    )
    return layout


TOP = 26
"""Pixels above the rows: times."""

_AROUND = TOP + 8

LEGEND_PLACE = {"y": 0, "yanchor": "top"}
"""Beneath the rows. The page has a legend of its own, which takes half of the lines on a phone."""

RANKS_TITLE: dict[str, object] = {
    "text": "rank", "x": 0, "xref": "paper", "xanchor": "right", "xshift": -24,
    "y": 1, "yref": "paper", "yanchor": "bottom", "yshift": 2, "showarrow": False,
}  # fmt: skip
"""Above the numbers of the rows, which have no word of their own: on a phone it took a tenth. The
first label of times, which may reach into the margin, is beside it."""


_MAX_WHOLE_LABELS = 200
"""Labels in seconds that an axis brings along: beyond them, a zoom has its labels in ms."""


def time_axis(length_ms: float) -> dict[str, Any]:
    """Return the axis of times since a step's first span. Its values are ms at any length.

    A label has the unit: a title would be on the legend. Only the last one has " ms", so that
    there is room on a phone. Labels of a long step are in seconds, as far as they are multiples of
    a power of ten of which the step has at most `_MAX_WHOLE_LABELS`; those of a closer zoom are in
    ms.
    """
    axis: dict[str, Any] = {
        "side": "top",  # rows may reach below the screen
        "tickformat": ",",
        "ticksuffix": " ms",
        "showticksuffix": "last",
        "ticklabeloverflow": "allow",
    }
    if length_ms * NS_PER_MS >= MIN_AXIS_S * NS_PER_S:
        grid_ms = 10 ** max(3, math.ceil(math.log10(length_ms / _MAX_WHOLE_LABELS)))
        # Plotly cannot divide: it replaces texts, of which these alone have no comma.
        axis["tickformatstops"] = [{"dtickrange": [grid_ms, None], "value": "d"}]
        axis["labelalias"] = {
            f"{at}{suffix}": f"{at // 1000:,} s"
            for at in range(grid_ms, round(length_ms) + grid_ms, grid_ms)
            for suffix in ("", " ms")
        }
    return axis

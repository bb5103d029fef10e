"""Figures of one rank: its place, its time against its peers, and samples on the same axis."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from rankscope.analysis.report.text import format_seconds
from rankscope.tracer.span import NS_PER_S

from ..text import cut_middle, escape_for_plotly
from ..theme import CLEAR, FAST, IDEAL, KIND_COLORS, SLOW, apply_style, axis_unit, rgba
from .excess import MIN_SCALE_RATIO
from .run_axis import MAX_LABELLED
from .step_time import open_marks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from rankscope.analysis.report.report import RunReport
    from rankscope.dashboard.figures.host_boxes import HostBoxes
    from rankscope.dashboard.records.rank_details import (
        KindSeries,
        RankDetails,
        RankValues,
        SampleSeries,
    )

MAX_PANELS = 14
_PANEL, _SPACE, _FRAME = 78, 26, 76
"""Pixels of a panel, between two, and around all."""

_SCALES = {
    "-hz": (1e9, "GHz"),
    "-w": (1.0, "W"),
    "-c": (1.0, "°C"),
    "-ratio": (0.01, "%"),
    "-bytes": (1e9, "GB"),
    "-ns": (1e6, "ms"),
}
"""Unit of a name's end, and its size in the name's own unit."""

_ORDER = (
    "gpu-clock-hz",
    "gpu-power-w",
    "gpu-temperature-c",
    "gpu-utilisation-ratio",
    "gpu-throttle-reasons",
    "gpu-memory-used-bytes",
    "cpu-busy-ratio",
    "memory-used-bytes",
    "nic-",
    "rdma-",
    "link-",
    "disk-",
)
"""Beginnings of the sampled names that are drawn; those alike their peers' in this order."""

_NOISE = 3.0
"""Standard deviations within which samples are like their peers': counters of few events differ by
many times."""

_MAX_NAMED_HOSTS = 96
_MAX_CHARS, _MIN_CHARS = 36, 6
"""Characters above the heat map on a phone, and those of a host whose box is narrow."""


def rank_over_steps_figure(report: RunReport, details: RankDetails) -> go.Figure:
    """Draw a panel for each kind of span and sampled quantity, over one axis of steps.

    The rank is a line in the colour of the kind, the median of its peers dotted. The first panel
    has its compute above the step's median rank. Each panel has the unit that suits its longest
    time: one of a minute, in a hang, would make 0.00051 s of 510 us elsewhere. Kinds come before
    samples, what takes longer than the peers' first. A step that never ended is a mark, which the
    title explains if it is beyond the axis of the others.
    """
    run, excess = report.run, report.excess
    own = details.rank in excess.ranks and bool(
        np.nan_to_num(excess.excess_ns[excess.ranks.index(details.rank)]).any()
    )
    kinds = sorted(
        (one for one in details.kinds if np.nansum(one.own_s) or np.nansum(one.peers_s)),
        key=lambda one: -np.nansum(one.own_s - one.peers_s),
    )
    panels = [_Panel.of(one, details.steps, report.open_step) for one in kinds]
    units = [axis_unit(one.highest_s * NS_PER_S) for one in panels]
    own_ns = excess.excess_ns[excess.ranks.index(details.rank)] if own else np.zeros(1)
    own_unit, own_unit_ns = axis_unit(float(np.nanmax(np.abs(own_ns))))
    samples = _chosen(details.samples)[: max(0, MAX_PANELS - len(kinds))]
    num = own + len(kinds) + len(samples)
    height = num * (_PANEL + _SPACE) + _FRAME
    figure = make_subplots(
        rows=max(num, 1), cols=1, shared_xaxes=True,
        vertical_spacing=min(_SPACE / height, 1 / max(num, 1) / 2),
        subplot_titles=[
            *([f"compute above the median rank ({own_unit})"] if own else []),
            *(
                f"{one.kind.value} ({unit}){panel.beyond}"
                for one, panel, (unit, _) in zip(kinds, panels, units, strict=True)
            ),
            *(escape_for_plotly(_title(one)) for one in samples),
        ],
    )  # fmt: skip
    apply_style(figure, height=height, zoom_key=f"rank {run} {details.rank}")
    if own:
        figure.add_trace(
            go.Bar(
                x=[step + 0.5 for step in excess.steps],
                y=(own_ns / own_unit_ns).tolist(),
                customdata=list(excess.steps),
                marker={"color": SLOW, "line": {"width": 0}},
                showlegend=False,
                hovertemplate=f"step %{{customdata}}: %{{y:+.4~g}} {own_unit}<extra></extra>",
            ),
            row=1, col=1,
        )  # fmt: skip
    steps = list(details.steps)
    # In the middle of the step, as samples are.
    middle = [step + 0.5 for step in steps]
    for row, (one, panel, (unit, unit_ns)) in enumerate(
        zip(kinds, panels, units, strict=True), start=1 + own
    ):
        for name, seconds, style in (
            ("median of its peers", one.peers_s, {"color": IDEAL, "dash": "dot", "width": 1.5}),
            (f"rank {details.rank}", one.own_s, {"color": KIND_COLORS[one.kind], "width": 2}),
        ):
            ended = panel.num_ended
            figure.add_trace(
                go.Scatter(
                    name=name,
                    x=middle[:ended],
                    y=(seconds[:ended] * NS_PER_S / unit_ns).tolist(),
                    customdata=steps[:ended],
                    mode="lines+markers" if _has_lone_step(seconds[:ended]) else "lines",
                    line=style,
                    marker={"size": 4},
                    showlegend=False,
                    hovertemplate=(
                        f"step %{{customdata}}: %{{y:.4~g}} {unit}, {name}<extra></extra>"
                    ),
                ),
                row=row, col=1,
            )  # fmt: skip
            opened = _known(seconds[ended:])
            places, symbols = open_marks(opened, lowest=panel.lowest_s, highest=panel.highest_s)
            if not any(places):
                continue
            figure.add_trace(
                go.Scatter(
                    name=name,
                    x=middle[ended:],
                    y=(np.array(places, np.float64) * NS_PER_S / unit_ns).tolist(),
                    customdata=[
                        f"step {step}: {format_seconds(value)}"
                        for step, value in zip(steps[ended:], opened, strict=True)
                    ],
                    mode="markers",
                    marker={"symbol": symbols, "size": 8, "color": style["color"]},
                    cliponaxis=False,
                    showlegend=False,
                    hovertemplate=f"%{{customdata}}, never ended, {name}<extra></extra>",
                ),
                row=row, col=1,
            )  # fmt: skip
    for row, sampled in enumerate(samples, start=own + len(kinds) + 1):
        size, unit = _unit(sampled)
        if np.isfinite(sampled.peers).any():
            figure.add_trace(
                go.Scatter(
                    x=sampled.at_step.tolist(),
                    y=(sampled.peers / size).tolist(),
                    mode="lines",
                    line={"color": IDEAL, "dash": "dot", "width": 1.5},
                    showlegend=False,
                    hovertemplate=f"step %{{x:.2f}}: %{{y:.4~g}} {unit}, median of its peers"
                    "<extra></extra>",
                ),
                row=row, col=1,
            )  # fmt: skip
        figure.add_trace(
            go.Scatter(
                x=sampled.at_step.tolist(),
                y=(sampled.value / size).tolist(),
                mode="lines+markers" if len(sampled.value) < 2 else "lines",  # noqa: PLR2004
                line={"color": FAST if sampled.is_device else "#63a753", "width": 1.5},
                showlegend=False,
                hovertemplate=f"step %{{x:.2f}}: %{{y:.4~g}} {unit}<extra></extra>",
            ),
            row=row, col=1,
        )  # fmt: skip
    figure.update_layout(margin={"l": 62, "r": 16, "t": 24, "b": 44})
    figure.update_annotations(font_size=11.5, x=0, xanchor="left")
    grid = rgba(IDEAL, 0.22)
    figure.update_xaxes(gridcolor=grid)
    figure.update_yaxes(gridcolor=grid, nticks=4)
    if len(steps) <= MAX_LABELLED:  # plotly would label halves of steps
        figure.update_xaxes(tickmode="array", tickvals=middle, ticktext=list(map(str, steps)))
    figure.update_xaxes(title_text="step", row=max(num, 1), col=1)
    return figure


class _Panel(NamedTuple):
    """Range of the axis of a panel: of the steps that ended, unless none did."""

    num_ended: int
    lowest_s: float
    highest_s: float
    beyond: str
    """For the title: times of a step that never ended, if they are beyond."""

    @classmethod
    def of(cls, kind: KindSeries, steps: Sequence[int], open_step: int | None) -> _Panel:
        num = len(steps) if open_step is None else int(np.searchsorted(steps, open_step))
        both = np.stack([kind.own_s, kind.peers_s])
        if not np.isfinite(both[:, :num]).any():
            num = len(steps)
        lowest, highest = float(np.nanmin(both[:, :num])), float(np.nanmax(both[:, :num]))
        opened = both[:, num : num + 1]
        if not ((opened < lowest) | (opened > highest)).any():
            return cls(num, lowest, highest, "")
        own, peers = (format_seconds(one) for one in _known(opened[:, 0]))
        return cls(num, lowest, highest, f", open: {own}, peers {peers}")


def _has_lone_step(seconds: NDArray[np.float64]) -> bool:
    """Return whether a step has a value between two that have none: a line would not show it."""
    known = np.pad(np.isfinite(seconds), 1)
    return bool((known[1:-1] & ~known[:-2] & ~known[2:]).any())


def _known(seconds: NDArray[np.float64]) -> list[float | None]:
    return [None if np.isnan(one) else one for one in seconds.tolist()]


def _chosen(samples: tuple[SampleSeries, ...]) -> list[SampleSeries]:
    """Return the series that are drawn, the one that is furthest from its peers first.

    Counters that never grew are left out.
    """
    shown = [
        one
        for one in samples
        if one.name.startswith(_ORDER)
        and not (one.name.endswith(("-throttle-reasons",)) and not one.value.any())
        and not (one.is_rate and not np.nansum(one.value))
        and "total" not in one.name
    ]
    place = {name: number for number, name in enumerate(_ORDER)}

    def key(one: SampleSeries) -> tuple[float, int, str]:
        number = min(place[name] for name in _ORDER if one.name.startswith(name))
        return -round(_deviation(one), 1), number, one.name

    return sorted(shown, key=key)


def _deviation(one: SampleSeries) -> float:
    """Return how far samples are from the peers', as a share of both: 0 to 1.

    0 if that is within `_NOISE` deviations of the peers' own line.
    """
    known = np.isfinite(one.value) & np.isfinite(one.peers)
    if not known.any():
        return 0.0
    value, peers = one.value[known], one.peers[known]
    difference = np.abs(value - peers).mean()
    if difference <= _NOISE * np.std(peers):
        return 0.0
    return float(difference / (np.abs(value) + np.abs(peers)).mean())


def _unit(sampled: SampleSeries) -> tuple[float, str]:
    name = sampled.name.partition(":")[0]
    size, unit = next((each for end, each in _SCALES.items() if name.endswith(end)), (1.0, ""))
    return size, f"{unit}/s" if sampled.is_rate else unit


def _title(sampled: SampleSeries) -> str:
    name, _, part = sampled.name.partition(":")
    end = next((end for end in _SCALES if name.endswith(end)), "")
    words = name.removesuffix(end).replace("-", " ")
    unit = _unit(sampled)[1]
    where = "" if sampled.is_device else ", host"
    return f"{words}{f' of {part}' if part else ''}{where}{f' ({unit})' if unit else ''}"


def place_figure(report: RunReport, rank: int) -> go.Figure:
    """Draw the grid of pipeline stages by data-parallel positions, with the rank's peers lit.

    The cells are the ranks of its own tensor- and context-parallel position. Its row has the ranks
    with which it reduces gradients, its column those of its pipeline; arrows show which way
    activations go.
    """
    at = report.coords[rank]
    alike = {
        (other.pp, other.dp): one
        for one, other in report.coords.items()
        if (other.tp, other.cp) == (at.tp, at.cp)
    }
    stages, dps = (sorted({key[axis] for key in alike}) for axis in (0, 1))
    shape = len(stages), len(dps)
    shade, number = np.full(shape, np.nan), np.full(shape, -1, dtype=np.int64)
    for (pp, dp), one in alike.items():
        lit = 3 if one == rank else 2 if dp == at.dp else 1 if pp == at.pp else 0
        cell = stages.index(pp), dps.index(dp)
        shade[cell], number[cell] = lit, one
    is_labelled = len(alike) <= 128 and len(dps) <= 24  # noqa: PLR2004  # room for a number
    figure = go.Figure(
        go.Heatmap(
            x=[str(dp) for dp in dps],
            y=[str(pp) for pp in stages],
            z=shade,
            customdata=number,
            zmin=0,
            zmax=3,
            colorscale=[
                (0.0, rgba(IDEAL, 0.22)),
                (1 / 3, rgba("#ae4200", 0.35)),
                (2 / 3, rgba("#5b60d7", 0.45)),
                (1.0, SLOW),
            ],
            showscale=False,
            xgap=2 if len(dps) <= 64 else 0,  # noqa: PLR2004  # cells of several pixels
            ygap=2,
            hovertemplate="rank %{customdata}<br>stage %{y}, DP %{x}<extra></extra>",
        )
    )
    if is_labelled:
        texts = [[str(one) if one >= 0 else "" for one in row] for row in number.tolist()]
        figure.update_traces(text=texts, texttemplate="%{text}")
    height = min(max(26 * len(stages) + 70, 120), 420)
    apply_style(figure, height=height, zoom_key=f"place {report.run} {rank}")
    figure.update_layout(margin={"l": 50, "r": 8, "t": 8, "b": 40})
    figure.update_xaxes(type="category", title_text="DP position", showgrid=False, nticks=12)
    figure.update_yaxes(
        type="category", title_text="stage", showgrid=False, autorange="reversed", nticks=16
    )
    column = dps.index(at.dp)
    if not is_labelled:  # its cell may have one pixel
        figure.add_trace(
            go.Scatter(
                x=[str(at.dp)],
                y=[str(at.pp)],
                mode="markers",
                marker={"symbol": "square", "size": 9, "color": SLOW},
                cliponaxis=False,
                hoverinfo="skip",
                showlegend=False,
            )
        )
    for upper in range(len(stages) - 1):
        figure.add_annotation(
            x=column, y=upper + 0.75, ax=column, ay=upper + 0.25, xref="x", yref="y",
            axref="x", ayref="y", showarrow=True, arrowhead=2, arrowwidth=1.5, arrowcolor=IDEAL,
            text="",
        )  # fmt: skip
    return figure


def heat_map_figure(
    boxes: HostBoxes, values: RankValues, *, run: str, step_s: float | None
) -> go.Figure:
    """Draw each rank as a cell in the box of its host; dark is long.

    Args:
        step_s: Mean time of a step, of which the scale has a share at least: see
            `excess.MIN_SCALE_RATIO`. None: unknown.
    """
    known = np.array(list(values.seconds.values()))
    low = float(known.min(initial=np.inf)) if known.size else 0.0
    high = max(float(known.max(initial=0.0)), low + MIN_SCALE_RATIO * (step_s or 0.0))
    unit, unit_ns = axis_unit(high * NS_PER_S)
    size = unit_ns / NS_PER_S
    lines, columns = boxes.seconds.shape
    hosts = np.full((lines, columns), "", dtype=object)
    for (line, column), rank in np.ndenumerate(boxes.rank):
        if rank >= 0:
            host, switch = values.hosts.get(int(rank), ("", ""))
            hosts[line, column] = escape_for_plotly(f"{host}, {switch}" if switch else host)
    figure = go.Figure(
        go.Heatmap(
            z=(boxes.seconds / size).astype(np.float32),
            customdata=boxes.rank,
            text=hosts,
            colorscale=[(0.0, rgba(FAST, 0.22)), (0.5, rgba("#e2b800", 0.85)), (1.0, SLOW)],
            zmin=low / size,
            zmax=high / size or 1.0,
            hoverongaps=False,
            xgap=1 if columns <= 160 else 0,  # noqa: PLR2004  # cells of several pixels
            ygap=1 if lines <= 80 else 0,  # noqa: PLR2004  # likewise
            hovertemplate=(
                f"rank %{{customdata}} on %{{text}}<br>%{{z:.4~g}} {unit}<extra></extra>"
            ),
            colorbar={"title": {"text": f"{unit} a step", "side": "right"}, "thickness": 10},
        )
    )
    pixels = 26 if lines <= 24 else 14 if lines <= 60 else 7  # noqa: PLR2004  # of a line
    apply_style(figure, height=max(160, pixels * lines + 30), zoom_key=f"heat {run}")
    figure.update_layout(margin={"l": 8, "r": 8, "t": 14, "b": 8}, plot_bgcolor=CLEAR)
    if len(boxes.boxes) <= _MAX_NAMED_HOSTS:
        room = max(_MIN_CHARS, _MAX_CHARS * boxes.box_width // columns)
        figure.add_trace(
            go.Scatter(
                x=[box.column - 0.5 for box in boxes.boxes],
                y=[box.line - 0.75 for box in boxes.boxes],
                mode="text",
                text=[escape_for_plotly(cut_middle(box.host, room)) for box in boxes.boxes],
                textposition="middle right",
                textfont={"size": 10},
                hoverinfo="skip",
                showlegend=False,
            )
        )
    figure.update_xaxes(visible=False, range=[-0.6, columns - 0.4])
    figure.update_yaxes(visible=False, range=[lines - 0.4, -1.4])
    return figure

"""The figure of a finding's proof card: the guilty quantity beside that of peers, and its price.

Everything has a place that is set here, also the ticks, so that `static_svg` can draw the same
figure into a file without plotly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor, log10
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from rankscope.analysis.causes.detector import Subject
from rankscope.analysis.causes.order import CAUSES
from rankscope.analysis.report.proof_card import ProofCard
from rankscope.analysis.report.text import (
    format_count,
    format_percent,
    format_seconds,
    format_steps,
)

from ..text import cut, escape_for_plotly
from ..theme import FAST, INK, SLOW, apply_style, rgba

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.report.proof_card import (
        PointCloud,
        ProofFact,
        SampleGroup,
        SampleStrip,
        StepSeries,
    )
    from rankscope.analysis.report.report import Finding, RunReport

MIN_PX = 760
"""Width below which the figure scrolls."""

WHOLE, LEFT, RIGHT = (0.0, 1.0), (0.0, 0.54), (0.63, 1.0)
CLOUD = (0.05, LEFT[1])
"""Columns, as shares of the width."""

MARGIN_PX, RIGHT_PX = 10, 30
TITLE_PX, LABEL_PX, ROW_PX, AXIS_PX, BETWEEN_PX = 20, 18, 40, 26, 16
PLOT_PX = 150
MAX_LABEL = 130
"""Characters of a line over the whole width: a list of ranks may be long."""

MAX_NAME = 34
"""Characters of the name of a group of samples, before its numbers."""

MAX_LEFT, MAX_RIGHT = 84, 50
"""Characters of a line in a column: a longer one would run into the next column, or be cut."""

_SCALES = {
    "ns": (("s", 1e9), ("ms", 1e6), ("us", 1e3), ("ns", 1.0)),
    "bytes": (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1.0)),
    "bytes/s": (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1.0)),
    "": (("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0)),
}


@dataclass(frozen=True, slots=True)
class Scale:
    """Unit in which the values of one axis are shown."""

    unit: str
    factor: float
    """Of that unit, in the unit of the data."""

    @classmethod
    def of(cls, unit: str, longest: float) -> Scale:
        """Return the scale in which the largest value has one to three digits before its point."""
        scales = _SCALES.get(unit) or tuple(
            (f"{prefix}{unit}", factor) for prefix, factor in _SCALES[""]
        )
        fitting = (scale for scale in scales if abs(longest) >= scale[1])
        return cls(*next(fitting, scales[-1]))

    def text(self, value: float) -> str:
        """Return a value with three digits, without its unit."""
        return f"{value / self.factor:.3g}" if value else "0"

    def with_unit(self, value: float) -> str:
        """Return a value with its unit."""
        return f"{self.text(value)} {self.unit}".rstrip() if value else "0"


@dataclass(slots=True)
class _Drawing:
    """The figure while panels are added: places are pixels from its top."""

    traces: list[dict[str, Any]] = field(default_factory=list)
    axes: dict[str, dict[str, Any]] = field(default_factory=dict)
    annotations: list[dict[str, Any]] = field(default_factory=list)
    shapes: list[dict[str, Any]] = field(default_factory=list)
    places: list[tuple[int, float, float]] = field(default_factory=list)
    """Number, top and bottom of each panel with axes."""

    titles: list[tuple[float, float, str, str]] = field(default_factory=list)
    """Left end, top, text and colour of lines outside axes."""

    def axes_at(
        self,
        column: tuple[float, float],
        top: float,
        height: float,
        x: dict[str, Any],
        y: dict[str, Any],
    ) -> tuple[str, str]:
        """Add a pair of axes; return the names by which traces refer to them."""
        number = len(self.places) + 1
        self.places.append((number, top, top + height))
        suffix = "" if number == 1 else str(number)
        self.axes[f"xaxis{suffix}"] = {"domain": column, "anchor": f"y{suffix}", **x}
        self.axes[f"yaxis{suffix}"] = {"anchor": f"x{suffix}", **y}
        return f"x{suffix}", f"y{suffix}"

    def write(self, column: tuple[float, float], top: float, text: str, color: str = INK) -> None:
        """Add a line of text, not escaped, at the left end of a column."""
        self.titles.append((column[0], top, _fit(text, column), color))

    def figure(self, height: float, *, zoom_key: str) -> go.Figure:
        figure = go.Figure(self.traces)
        apply_style(figure, height=round(height) + 2 * MARGIN_PX, zoom_key=zoom_key)
        for number, top, bottom in self.places:
            suffix = "" if number == 1 else str(number)
            self.axes[f"yaxis{suffix}"]["domain"] = (1 - bottom / height, 1 - top / height)
        written = [
            _note(text, x=x, y=1 - top / height, xref="paper", yref="paper", color=color)
            for x, top, text, color in self.titles
        ]
        margin = dict.fromkeys("ltb", MARGIN_PX) | {"r": RIGHT_PX}
        figure.update_layout(self.axes)
        figure.update_layout(
            annotations=[*self.annotations, *written],
            shapes=self.shapes,
            margin=margin,
            showlegend=False,
        )
        figure.update_xaxes(automargin=False, fixedrange=True)
        figure.update_yaxes(automargin=False, fixedrange=True)
        if not self.places:  # the style has made a pair of axes
            figure.update_xaxes(visible=False)
            figure.update_yaxes(visible=False)
        return figure


def proof_figure(report: RunReport, finding: Finding) -> go.Figure | None:
    """Draw the proof card of a finding; None if neither a quantity nor a price is known.

    On the left the samples of culprits and peers, facts about ranks, and time against length; on
    the right the sum in each step; then what else was measured, and the step with and without the
    finding.
    """
    card, drawing = finding.card or ProofCard(), _Drawing()
    has_series = card.series is not None
    column, top, right = LEFT if has_series else WHOLE, 0.0, 0.0
    if card.strips:
        top = _draw_strip(drawing, card.strips[0], column, top)
    if card.facts:
        top = _draw_facts(drawing, card.facts, column, top)
    if card.cloud is not None:
        top = _draw_cloud(drawing, card.cloud, top)
    if card.series is not None:
        right = _draw_series(drawing, card.series, card.onset, right)
    # The rest fills the shorter column.
    for strip in card.strips[1:]:
        if has_series and right < top:
            right = _draw_strip(drawing, strip, RIGHT, right)
        else:
            top = _draw_strip(drawing, strip, column, top)
    if has_series and right < top:
        right = _draw_price(drawing, report, finding, RIGHT, right)
    else:
        top = _draw_price(drawing, report, finding, column, top)
    height = max(top, right) - BETWEEN_PX
    if height <= 0:
        return None
    return drawing.figure(height, zoom_key=f"proof {report.run} {finding.cause} {finding.ranks}")


def describe_group(group: SampleGroup, unit: str, *, is_brief: bool = False) -> str:
    """Return a group of samples in words: "rank 33: 30.1 to 31.1 ms, median 30.5 ms (8 values)".

    A brief one has no median.
    """
    scale = Scale.of(unit, group.high)
    low, high = scale.text(group.low), scale.with_unit(group.high)
    values = high if group.low == group.high else f"{low} to {high}"
    middle = "" if group.num == 1 or is_brief else f", median {scale.with_unit(group.median)}"
    label = cut(group.label, MAX_NAME)
    return f"{label}: {values}{middle} ({format_count(group.num, 'value')})"


def _draw_strip(
    drawing: _Drawing, strip: SampleStrip, column: tuple[float, float], top: float
) -> float:
    """Draw one quantity, a row of points for each group; return where the next panel begins."""
    where = f", {strip.steps}" if strip.steps else ""
    drawing.write(column, top, f"{strip.quantity}{where}")
    num = len(strip.groups)
    longest = max(group.high for group in strip.groups)
    scale = Scale.of(strip.unit, longest)
    x, y = drawing.axes_at(
        column,
        top + TITLE_PX,
        ROW_PX * num,
        _axis(longest, scale),
        {"range": (num, 0), "visible": False},
    )
    for row, group in enumerate(strip.groups):
        color = SLOW if group.is_culprit else FAST
        text = describe_group(group, strip.unit, is_brief=column == RIGHT)
        label = _fit(text, column)
        drawing.annotations.append(_note(label, x=0.0, y=row, xref=x, yref=y, color=color))
        # Spread over the row by the golden ratio: equal values would hide each other.
        offsets = [row + 0.55 + 0.35 * (0.618 * place % 1) for place in range(len(group.values))]
        drawing.traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": list(group.values),
                "y": offsets,
                "xaxis": x,
                "yaxis": y,
                "marker": {"size": 6, "color": rgba(color, 0.55)},
                "text": [scale.with_unit(value) for value in group.values],
                "hovertemplate": f"{escape_for_plotly(cut(group.label, MAX_LABEL))}"
                ": %{text}<extra></extra>",
                "cliponaxis": False,
            }
        )
        drawing.shapes.append(
            _line(x, y, (group.median, row + 0.5), (group.median, row + 0.95), color)
        )
    return top + TITLE_PX + ROW_PX * num + AXIS_PX + BETWEEN_PX


def _draw_facts(
    drawing: _Drawing, facts: Sequence[ProofFact], column: tuple[float, float], top: float
) -> float:
    """Write what is known of ranks in words, a line for the ranks and one for the fact."""
    for fact in facts:
        color = SLOW if fact.is_culprit else FAST
        drawing.write(column, top, fact.label, color)
        drawing.write(column, top + LABEL_PX, fact.text)
        top += ROW_PX
    return top + BETWEEN_PX


def _draw_series(drawing: _Drawing, series: StepSeries, onset: int | None, top: float) -> float:
    """Draw the sum of a quantity by step, with the onset."""
    known = [value for value in (*series.culprit, *series.usual) if value is not None]
    longest = max(known, default=1.0) or 1.0
    scale = Scale.of(series.unit, longest)
    drawing.write(RIGHT, top, f"{series.quantity} ({scale.unit})")
    lines = (
        (series.culprit_label, series.culprit, series.culprit_median, SLOW),
        (series.usual_label, series.usual, series.usual_median, FAST),
    )
    top += TITLE_PX
    for label, _, middle, color in lines:
        text = f"{cut(label, MAX_NAME)}: {'n/a' if middle is None else scale.with_unit(middle)}"
        drawing.write(RIGHT, top, text, color)
        top += LABEL_PX
    first, last = series.steps[0], series.steps[-1]
    high = longest * (1.04 if onset is None else 1.18)
    x, y = drawing.axes_at(
        RIGHT,
        top + BETWEEN_PX / 2,
        PLOT_PX,
        {
            "range": (first - 0.5, last + 0.5),
            "tickvals": _step_ticks(first, last),
            # Only the last one has the word: the first would be on the 0 of the other axis.
            "ticktext": [
                f"step {step:,}" if step == last else f"{step:,}"
                for step in _step_ticks(first, last)
            ],
            "showgrid": False,
            "zeroline": False,
        },
        _axis(longest, scale, num=4, with_unit=False) | {"range": (0.0, high)},
    )
    for label, values, _, color in lines:
        drawing.traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": list(series.steps),
                "y": list(values),
                "xaxis": x,
                "yaxis": y,
                "line": {"color": color, "width": 2},
                "marker": {"color": color, "size": 5},
                "text": ["" if value is None else scale.with_unit(value) for value in values],
                "hovertemplate": f"step %{{x}}, {escape_for_plotly(cut(label, MAX_LABEL))}"
                ": %{text}<extra></extra>",
            }
        )
    if onset is not None:
        drawing.shapes.append(_line(x, y, (onset - 0.5, 0), (onset - 0.5, high), INK, dash="dot"))
        drawing.annotations.append(
            _note(f" from step {onset:,}", x=onset - 0.5, y=high, xref=x, yref=y)
        )
    return top + BETWEEN_PX / 2 + PLOT_PX + AXIS_PX + BETWEEN_PX


def _draw_cloud(drawing: _Drawing, cloud: PointCloud, top: float) -> float:
    across, up = max(cloud.x), max(cloud.y)
    scale, y_scale = Scale.of(cloud.x_unit, across), Scale.of(cloud.y_unit, up)
    drawing.write(LEFT, top, f"{cloud.y_quantity} ({y_scale.unit})")
    drawing.write(LEFT, top + LABEL_PX, f"against {cloud.x_quantity}", SLOW)
    top += TITLE_PX + LABEL_PX + BETWEEN_PX / 2
    x, y = drawing.axes_at(
        CLOUD, top, PLOT_PX, _axis(across, scale), _axis(up, y_scale, num=4, with_unit=False)
    )
    drawing.traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": list(cloud.x),
            "y": list(cloud.y),
            "xaxis": x,
            "yaxis": y,
            "marker": {"size": 5, "color": rgba(SLOW, 0.45)},
            "text": [y_scale.with_unit(value) for value in cloud.y],
            "hovertemplate": "%{text}<extra></extra>",
        }
    )
    return top + PLOT_PX + AXIS_PX + BETWEEN_PX


def _draw_price(
    drawing: _Drawing, report: RunReport, finding: Finding, column: tuple[float, float], top: float
) -> float:
    """Draw the step as it is, and as the replay has it without the finding, if it has a price.

    It is the mean of the steps that the finding shows in: of all, only if those are unknown.
    """
    own = report.price_while_shown(finding)
    price = own or report.price(finding)
    if price is None or price.seconds <= 0:
        return top
    when = f" since step {price.since:,}" if price.since is not None else ""
    if own is not None and finding.steps is not None and not report.is_open(finding):
        when = f" in {format_steps(finding.steps)}"
    rows = (
        (f"step as recorded{when}: {format_seconds(price.step_s)}", price.step_s, SLOW),
        (
            (
                f"{_without(finding, report)}: {format_seconds(price.fixed_step_s)}"
                f" ({format_percent(price.share)} less)"
            ),
            price.fixed_step_s,
            FAST,
        ),
    )
    num = len(rows)
    x, y = drawing.axes_at(
        column,
        top,
        ROW_PX * num,
        {"range": (0, price.step_s), "visible": False},
        {"range": (num, 0), "visible": False},
    )
    # A trace, without which plotly does not draw a pair of axes.
    drawing.traces.append(
        {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "xaxis": x, "yaxis": y}
    )
    for row, (text, seconds, color) in enumerate(rows):
        label = _fit(text, column)
        drawing.annotations.append(_note(label, x=0.0, y=row, xref=x, yref=y, color=color))
        drawing.shapes.append(
            {
                "type": "rect",
                "xref": x,
                "yref": y,
                "x0": 0,
                "x1": seconds,
                "y0": row + 0.52,
                "y1": row + 0.88,
                "fillcolor": color,
                "line": {"width": 0},
            }
        )
    return top + ROW_PX * num + BETWEEN_PX


def _fit(text: str, column: tuple[float, float]) -> str:
    """Return a line for plotly, not longer than its column."""
    return escape_for_plotly(cut(text, {LEFT: MAX_LEFT, RIGHT: MAX_RIGHT}.get(column, MAX_LABEL)))


def _without(finding: Finding, report: RunReport) -> str:
    num = len(finding.ranks)
    if num == 0 or 2 * num > report.world_size:  # most ranks have no peers
        return "without it"
    subject = CAUSES[finding.cause].subject if finding.cause in CAUSES else Subject.RANKS
    if subject is Subject.LINK:
        return "with alike links' rate"
    if subject is Subject.STAGE and finding.ranks[0] in report.coords:
        return f"with stage {report.coords[finding.ranks[0]].pp} as the others"
    who = f"rank {finding.ranks[0]}" if num == 1 else f"these {num:,} ranks"
    return f"with {who} as {'its' if num == 1 else 'their'} peers"


def _axis(longest: float, scale: Scale, *, num: int = 5, with_unit: bool = True) -> dict[str, Any]:
    """Return an axis from 0 to a value, with its ticks."""
    ticks = [tick * scale.factor for tick in _nice_ticks(longest / scale.factor, num)]
    texts = [scale.with_unit(tick) if with_unit else scale.text(tick) for tick in ticks]
    return {
        "range": (0.0, longest * 1.04 or 1.0),
        "tickvals": ticks,
        "ticktext": texts,
        "zeroline": False,
    }


def _nice_ticks(longest: float, num: int) -> list[float]:
    """Return at most ``num`` round values from 0 on."""
    if longest <= 0:
        return [0.0]
    rough = longest / num
    power = 10.0 ** floor(log10(rough))
    width = next(nice * power for nice in (1, 2, 2.5, 5, 10) if nice * power >= rough)
    return [width * place for place in range(int(longest / width) + 1)]


def _step_ticks(first: int, last: int) -> list[int]:
    return sorted({first, (first + last) // 2, last}) if last - first > 1 else sorted({first, last})


def _note(
    text: str, *, x: float, y: float, xref: str, yref: str, color: str = INK
) -> dict[str, Any]:
    return {
        "text": text,
        "x": x,
        "y": y,
        "xref": xref,
        "yref": yref,
        "xanchor": "left",
        "yanchor": "top",
        "showarrow": False,
        "font": {"size": 12, "color": color},
    }


def _line(  # two axes, two ends, two properties
    xref: str,
    yref: str,
    begin: tuple[float, float],
    end: tuple[float, float],
    color: str,
    *,
    dash: str = "solid",
) -> dict[str, Any]:
    (x0, y0), (x1, y1) = begin, end
    return {
        "type": "line",
        "xref": xref,
        "yref": yref,
        "x0": x0,
        "y0": y0,
        "x1": x1,
        "y1": y1,
        "line": {"color": color, "width": 2, "dash": dash},
    }

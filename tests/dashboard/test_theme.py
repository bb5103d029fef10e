from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import rankscope.dashboard
from rankscope.dashboard.theme import KIND_COLORS
from rankscope.tracer.span import SpanKind

SEEN_BY = {
    "all cones": np.eye(3),
    "no green cones": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "no red cones": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
}
"""Linear RGB as a reader sees it. Source: Machado, Oliveira and Fernandes 2009, severity 1."""

TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])

MIN_DIFFERENCE = 15.0
"""Distance in CIE Lab from which two small areas have clearly different colours."""

MIN_WAIT_DIFFERENCE = 14.5
"""That of waits on dark: no grey darker than the work has 15 from every kind for every reader."""

MIN_CONTRAST = 1.6
"""Of the palest colour with the background beside it."""


def linear_rgb(color: str) -> np.ndarray:
    parts = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(linear: np.ndarray) -> np.ndarray:
    ratio = TO_XYZ @ np.clip(linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one: str, other: str) -> float:
    bright, dark = sorted((TO_XYZ[1] @ linear_rgb(color) for color in (one, other)), reverse=True)
    return float((bright + 0.05) / (dark + 0.05))


@pytest.mark.parametrize("reader", SEEN_BY)
def test_any_two_kinds_have_different_colours_for_every_reader(reader: str) -> None:
    seen = {kind: lab(SEEN_BY[reader] @ linear_rgb(color)) for kind, color in KIND_COLORS.items()}

    alike = [
        (one.value, other.value)
        for one, other in combinations(seen, 2)
        if np.linalg.norm(seen[one] - seen[other]) < MIN_DIFFERENCE
    ]

    assert alike == []


@pytest.mark.parametrize("reader", SEEN_BY)
def test_waits_are_darker_on_dark_and_differ_from_all_other_kinds(reader: str) -> None:
    style = (Path(rankscope.dashboard.__path__[0]) / "assets" / "rankscope.css").read_text()
    (wait,) = re.findall(r"--wait: (#[0-9a-f]{6});", style)
    forward = KIND_COLORS[SpanKind.FORWARD]
    seen, work = (lab(SEEN_BY[reader] @ linear_rgb(color)) for color in (wait, forward))

    distances = {
        kind.value: np.linalg.norm(seen - lab(SEEN_BY[reader] @ linear_rgb(color)))
        for kind, color in KIND_COLORS.items()
        if kind is not SpanKind.WAIT
    }

    assert min(distances.values()) >= MIN_WAIT_DIFFERENCE
    assert contrast(wait, "#181c22") >= MIN_CONTRAST
    assert seen[0] < work[0] - 15
    # The style sheet replaces the colour of waits that plotly and the legend write.
    light = KIND_COLORS[SpanKind.WAIT].removeprefix("#")
    assert f'"rgb({", ".join(map(str, bytes.fromhex(light)))})"' in style


def test_each_kind_contrasts_with_the_light_and_the_dark_background() -> None:
    pale = [
        kind.value
        for kind, color in KIND_COLORS.items()
        if min(contrast(color, "#ffffff"), contrast(color, "#181c22")) < MIN_CONTRAST
    ]

    assert pale == []

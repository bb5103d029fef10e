from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.errors import BadInputError
from rankscope.server.serve import Part, ServeOptions, SpoolOptions, parse_part

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "part"),
    [(None, None), ("collector", Part.COLLECTOR), ("dashboard", Part.DASHBOARD)],
)
def test_a_half_of_the_server_is_named_by_the_flag(text: str | None, part: Part | None) -> None:
    assert parse_part(text) == part


@pytest.mark.parametrize("text", ["", "Collector", "both"])
def test_another_text_is_refused_with_the_valid_ones(text: str) -> None:
    with pytest.raises(BadInputError, match="give collector or dashboard"):
        parse_part(text)


def test_a_dashboard_alone_refuses_a_spool(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="leave out --spool"):
        ServeOptions(only=Part.DASHBOARD, spool=SpoolOptions(folder=tmp_path))

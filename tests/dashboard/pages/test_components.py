"""Components of every page: ranks as links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from dash import dcc

from rankscope.dashboard.pages.components import link_ranks, rank_links

if TYPE_CHECKING:
    from collections.abc import Sequence


def shown(parts: Sequence[object]) -> str:
    """Return the text of parts, each link in brackets."""
    return "".join(
        f"[{part.children}]" if isinstance(part, dcc.Link) else str(part) for part in parts
    )


def test_each_rank_of_a_list_is_a_link_to_its_page() -> None:
    parts = rank_links("a/b", (0, 4, 5, 6, 9, 11, 13, 15, 17), max_ranges=2)

    assert shown(parts) == "[0], [4]-[6] and 5 more"
    assert shown(rank_links("a/b", (0, 1, 2), num_ranks=9)) == "[0]-[2] and 6 more"
    links: list[Any] = [part for part in parts if isinstance(part, dcc.Link)]
    assert [link.href for link in links] == [
        "/rank?run=a%2Fb&rank=0",
        "/rank?run=a%2Fb&rank=4",
        "/rank?run=a%2Fb&rank=6",
    ]
    assert rank_links("a", ()) == ["-"]


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("Rank 33 is slow; rank 2 waits.", "Rank [33] is slow; rank [2] waits."),
        ("ranks 0 to 7, 9 and 12,279 more", "ranks [0] to [7], [9] and 12,279 more"),
        ("ranks 1 and 3, 1.5 ms late", "ranks [1] and [3], 1.5 ms late"),
        ("rank 5, 12 of 30 steps; step 4", "rank [5], 12 of 30 steps; step 4"),
        ("host-rank-5", "host-rank-5"),
        ("rank 64 of a job of 64", "rank 64 of a job of 64"),
    ],
)
def test_the_ranks_of_a_sentence_are_links(sentence: str, expected: str) -> None:
    assert shown(link_ranks(sentence, "run", max_rank=63)) == expected

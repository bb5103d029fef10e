"""Pairs of ranks that became slow together, as the one uplink that they share."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from .link_culprits import Culprit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..trace.tables import RankInfo
    from .link_profile import LinkProfile

LEVELS: tuple[tuple[str, Callable[[RankInfo], str]], ...] = (
    ("hosts", lambda info: info.host),
    ("switches", lambda info: info.switch),
    ("racks", lambda info: info.rack),
)
"""Places that may lie at the two ends of an uplink, the narrowest first."""


def merged_by_uplink(
    culprits: Sequence[Culprit], profile: LinkProfile, ranks: Mapping[int, RankInfo]
) -> tuple[Culprit, ...]:
    """Merge the pairs between two stages of which all became slow together into one culprit.

    Where such pairs lie between several pairs of stages it is no one uplink, and nothing is merged.

    Args:
        culprits: What was found link by link.
        profile: Transfers by link and step.
        ranks: Where each rank runs.
    """
    links = profile.transfers.links
    together: list[Culprit] = []
    between: dict[tuple[int, int], list[int]] = defaultdict(list)
    for culprit in culprits:
        pairs = [each.link for each in culprit.links if links[each.link].is_pair]
        if pairs and all(profile.risen[link] for link in pairs):
            together.append(culprit)
            for link in pairs:
                low, high = sorted(ranks[rank].coords.pp for rank in links[link].members)
                between[low, high].append(link)
    if len(together) <= 1 or len(between) > 1:
        return tuple(culprits)
    ((stages, pairs),) = between.items()
    rest = tuple(each for each in culprits if not any(each is one for one in together))
    return (_uplink(together, stages, pairs, profile, ranks), *rest)


def _uplink(
    together: Sequence[Culprit],
    stages: tuple[int, int],
    pairs: Sequence[int],
    profile: LinkProfile,
    ranks: Mapping[int, RankInfo],
) -> Culprit:
    links = profile.transfers.links
    slow = {each.link: each for culprit in together for each in culprit.links}
    # Groups that hold such a pair are as slow as it is.
    also = {link for culprit in together for link in culprit.also} | (set(slow) - set(pairs))
    members = sorted({rank for link in pairs for rank in links[link].members})
    return Culprit(
        ranks=tuple(members),
        links=tuple(slow[link] for link in pairs),
        place=_place(stages, [ranks[rank] for rank in members]),
        also=tuple(sorted(also)),
        against="in other steps, with what links between other stages changed by taken out",
    )


def _place(stages: tuple[int, int], members: Sequence[RankInfo]) -> str:
    """Name the two stages, and what lies at their ends where that is one place each."""
    if stages[0] == stages[1]:
        return f"all links within stage {stages[0]}"
    text = f"all links between stages {stages[0]} and {stages[1]}"
    for word, where in LEVELS:
        ends = [{where(each) for each in members if each.coords.pp == stage} for stage in stages]
        if all(len(end) == 1 for end in ends) and ends[0] != ends[1]:
            (low,), (high,) = ends
            if low and high:
                return f"{text} ({word} {low} and {high})"
    return text

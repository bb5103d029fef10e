"""Cards of transfers: the rate of slow links beside alike ones, or beside their own other steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import sum_cells
from ..arrays.sorting import find_positions
from ..report.proof_card import ProofCard
from ..report.text import format_count, format_link
from .samples import column_medians, compare_samples, make_series, name_steps, shown_columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..causes.detector import Case
    from ..replay.model import Link
    from ..report.report import Finding

LEAST_EXCESS = 0.5
"""Share of the largest excess of a link from which another one counts as slow for the same reason.
"""


def transfer_card(finding: Finding, case: Case) -> ProofCard | None:
    """Return transfers of the slow links beside those of alike links; None if none is known.

    Alike are transfers of one operation and size among equally many ranks: of those, the ones in
    which the slow links lose most. If no other link carries any, they are compared with the same
    links in the steps that do not show the finding.
    """
    profile, transfers, steps = case.links, case.links.transfers, case.reading.steps
    shown = shown_columns(steps, finding.steps)
    slow = _find_slow(finding, case, shown)
    if not len(slow):
        return None
    in_shown = np.isin(transfers.step, np.array(steps)[shown])
    is_slow = np.isin(transfers.link, slow)
    alike = _worst_alike(transfers.alike, transfers.transfer_ns, is_slow & in_shown, in_shown)
    if alike is None:
        return None
    rows = transfers.alike == alike
    others = np.setdiff1d(transfers.link[rows], slow)
    is_all = not len(others)
    mine = rows & is_slow & in_shown
    theirs = rows & (is_slow & ~in_shown if is_all else ~is_slow & in_shown)
    is_rate = bool(
        (transfers.num_bytes[rows] > 0).all() and (transfers.transfer_ns[rows] > 0).all()
    )
    values = transfers.transfer_ns.astype(np.float64)
    if is_rate:
        values = transfers.num_bytes / np.maximum(values, 1.0) * 1e9
    label = _name_links([transfers.links[link] for link in slow.tolist()], finding.ranks)
    peers = "the same in other steps" if is_all else format_count(len(others), "alike link")
    name = transfers.names[int(transfers.name[rows][0])]
    kind = transfers.links[int(slow[0])].kind
    what = name if kind in name else f"{kind} {name}"
    strip = compare_samples(
        f"{what}: {'payload over transfer time' if is_rate else 'transfer'}",
        "bytes/s" if is_rate else "ns",
        name_steps(steps, shown),
        culprits=(label, values[mine]),
        usual=(peers, values[theirs]),
    )
    links = np.unique(transfers.link[rows])
    column = find_positions(transfers.step[rows], profile.steps)
    row = find_positions(transfers.link[rows], links)
    shape = (len(links), len(steps))
    total_ns = sum_cells(shape, row, column, transfers.transfer_ns[rows])
    total_ns[sum_cells(shape, row, column, np.ones(len(row))) == 0] = np.nan
    of_slow = total_ns[np.isin(links, slow)]
    of_others = np.where(shown, np.nan, of_slow) if is_all else total_ns[np.isin(links, others)]
    return ProofCard(
        strips=(strip,),
        series=make_series(
            "these transfers in a step",
            "ns",
            steps,
            culprits=(label, of_slow),
            usual=(peers, of_others),
            shown=shown,
        ),
    )


def _find_slow(finding: Finding, case: Case, shown: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the links of the named ranks that are slow as the worst of them, ascending.

    Several named ranks are a pair or a group: a link is theirs if it has two of them, if any has.
    """
    profile = case.links
    named = set(finding.ranks)
    shared = [len(named.intersection(link.members)) for link in profile.links]
    # Of a single named rank, all its links may be slow; of several, those that join two of them.
    least = min(max(shared, default=0), 2) if named else 0
    mine = np.flatnonzero(np.array(shared, dtype=np.int64) >= least)
    if not len(mine) or not shown.any():
        return mine[:0]
    over_ns = (profile.total_ns - profile.usual_ns)[np.ix_(mine, np.flatnonzero(shown))]
    excess_ns = np.nan_to_num(column_medians(over_ns.T))
    if excess_ns.max() <= 0:
        return mine[:0]
    is_slow: NDArray[np.bool_] = excess_ns >= LEAST_EXCESS * excess_ns.max()
    return mine[is_slow]


def _worst_alike(
    alike: NDArray[np.int32],
    transfer_ns: NDArray[np.int64],
    is_slow: NDArray[np.bool_],
    in_shown: NDArray[np.bool_],
) -> int | None:
    """Return the kind of transfers in which slow links lose most; None if they have none."""
    codes = np.unique(alike[is_slow])
    lost: dict[int, float] = {}
    for code in codes.tolist():
        mine_ns = transfer_ns[is_slow & (alike == code)]
        others_ns = transfer_ns[in_shown & ~is_slow & (alike == code)]
        usual_ns = float(np.median(others_ns)) if len(others_ns) else 0.0
        lost[code] = float(mine_ns.sum()) - usual_ns * len(mine_ns)
    return max(lost, key=lost.__getitem__) if lost else None


def _name_links(links: list[Link], ranks: tuple[int, ...]) -> str:
    of_rank = f" of rank {ranks[0]}" if len(ranks) == 1 else ""
    if len(links) > 1:
        return f"the {len(links):,} slowest links{of_rank}"
    link = links[0]
    if link.is_pair:
        return f"rank {link.members[0]} to rank {link.members[1]}"
    if of_rank:
        return f"{link.kind}{of_rank} ({format_count(len(link.members), 'rank')})"
    return f"{link.kind} {format_link(link.members)}"

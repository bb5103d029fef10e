"""How often a collector's clock may be asked, whoever and however many ask it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

NS_PER_S = 1_000_000_000

PROBES_PER_S = 1_000
"""Of all agents together; see docs/operations.md for what one costs."""

LONGEST_PAUSE_NS = 10 * NS_PER_S
"""No agent is sent away for longer: older ones don't keep to what they are told, and shall not
keep newer ones out."""


class ProbePace:
    """Gives everybody who asks a moment of its own for the next probe, one after the other.

    An agent that asks has one such moment, so the pause grows with the number of agents to
    number / rate by itself, nobody is counted, and those who came together come apart. Where
    fewer ask, the pause told is shorter than any agent's own, and means nothing.

    Args:
        monotonic_ns: The collector's ``CLOCK_MONOTONIC``.
        probes_per_s: How many are answered a second, at least 1.

    Source: the generic cell rate algorithm (virtual scheduling), ITU-T I.371, annex A.
    """

    def __init__(
        self, *, monotonic_ns: Callable[[], int], probes_per_s: int = PROBES_PER_S
    ) -> None:
        self._monotonic_ns = monotonic_ns
        self._gap_ns = NS_PER_S // probes_per_s
        self._taken_ns = 0

    def next_pause_ns(self) -> int:
        """Return for how long whoever asks now shall not ask again."""
        now_ns = self._monotonic_ns()
        taken_ns = max(self._taken_ns, now_ns) + self._gap_ns
        self._taken_ns = min(taken_ns, now_ns + LONGEST_PAUSE_NS)
        return self._taken_ns - now_ns

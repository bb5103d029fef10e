"""A cause found in the evidence, before the replay has priced it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One cause, where and when it showed, and how clearly."""

    cause: str
    """One of design.md section 5."""

    ranks: tuple[int, ...]
    """Global ranks at fault, ascending."""

    steps: tuple[int, int]
    """First and last step that show it."""

    part: NDArray[np.bool_] | None
    """Shape (ops,): operations that mending it would make ideal; None where the replay holds
    none of it."""

    excess_ratio: float
    threshold: float
    """What the excess had to exceed."""

    evidence: str
    """One sentence with numbers."""

    on_host: bool = False
    """Whether it lies in launch gaps, which only the full replay knows."""

    vanishes: bool = False
    """Whether mending it leaves nothing of its part, rather than what is usual: where everybody
    has it always, the usual is no ideal."""

    is_alarm: bool = True
    """False for what is only told beside the verdict (a checkpoint)."""

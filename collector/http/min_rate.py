"""Whether something goes on fast enough, told in stretches of time."""

from __future__ import annotations


class Window:
    """Says whether a total grew too little in a stretch of time.

    Stretches, not the mean since the begin: who sent much at first could trickle for hours.

    Args:
        length_s: Of a stretch.
    """

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._begin: tuple[float, int] | None = None

    def is_below(self, least_per_s: int, now_s: float, *, total: int, is_due: bool) -> bool:
        """Tell whether a stretch ends now in which the total grew by less than it had to.

        Args:
            least_per_s: What is asked for.
            now_s: Any clock that goes forward.
            total: So far.
            is_due: Whether it has to grow at all just now; a stretch begins when it does.
        """
        if not is_due:
            self._begin = None
            return False
        if self._begin is None:
            self._begin = (now_s, total)
        begin_s, before = self._begin
        if now_s - begin_s < self._length_s:
            return False
        self._begin = (now_s, total)
        return total - before < least_per_s * self._length_s

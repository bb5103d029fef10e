"""Errors of analysis."""

from __future__ import annotations


class AnalysisError(Exception):
    """Base of the errors that this package raises."""


class UnknownRunError(AnalysisError):
    """The source has no run of that name."""

    def __init__(self, run_id: str, known: tuple[str, ...]) -> None:
        listed = ", ".join(known[:8]) or "none yet"
        super().__init__(f"no run {run_id!r} in this store (runs: {listed}); see `rankscope runs`")
        self.run_id = run_id
        self.known = known


class DeletedRunError(UnknownRunError):
    """The run of that name was deleted."""

    def __init__(self, run_id: str, known: tuple[str, ...]) -> None:
        super().__init__(run_id, known)
        self.args = (f"run {run_id!r} was deleted; see `rankscope runs`",)


class EmptyRunError(AnalysisError):
    """The requested steps of a known run have no spans."""


class CycleError(AnalysisError):
    """Operations depend on each other in a cycle, so they have no order to replay."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__(
            f"{num_nodes} operations depend on each other in a cycle;"
            " their steps cannot be replayed"
        )
        self.num_nodes = num_nodes


class GraphTooLargeError(AnalysisError):
    """A step has too many operations for a graph of Python objects."""

    def __init__(self, step: int, num_nodes: int) -> None:
        super().__init__(
            f"step {step} has {num_nodes:,} operations, too many for a networkx graph:"
            " use the arrays of analysis.replay.model.ReplayModel"
        )
        self.step = step
        self.num_nodes = num_nodes

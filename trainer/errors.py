"""What the trainer raises on purpose."""

from __future__ import annotations


class TrainerError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(TrainerError, ValueError):
    """A setting cannot be trained with; the text names the field and says what to change."""


class FaultSpecError(ConfigError):
    """A fault's text is not of the form ``cause:key=value,...``, or a value is out of range."""

    def __init__(self, spec: str, problem: str) -> None:
        super().__init__(f"fault {spec!r}: {problem}")
        self.spec = spec
        self.problem = problem


class SegmentOrderError(TrainerError):
    """A local segment ended that had not begun: the markers do not alternate in the model."""


class LinkError(TrainerError):
    """This system cannot make a link slow."""


class PlantedCrashError(TrainerError):
    """A rank was to die by an exception, and does."""

    def __init__(self, *, rank: int, step: int) -> None:
        super().__init__(f"rank {rank} was to fail in step {step}, and does")
        self.rank = rank
        self.step = step


class ScenarioError(ConfigError):
    """A scenario cannot be simulated; the text names the field and says what to change."""

"""Errors of the trainer and the simulator."""

from __future__ import annotations


class TrainerError(Exception):
    """Base of the errors of this package."""


class ConfigError(TrainerError, ValueError):
    """A setting is invalid; the message names the field and says what to change."""


class FaultSpecError(ConfigError):
    """The text of a fault is not ``cause:key=value,...``, or a value is out of range."""

    def __init__(self, spec: str, problem: str) -> None:
        super().__init__(f"fault {spec!r}: {problem}")
        self.spec = spec
        self.problem = problem


class SegmentOrderError(TrainerError):
    """A local segment ended that had not begun: begin and end marks do not alternate."""


class LinkError(TrainerError):
    """The kernel does not allow setting the speed of a link."""


class CrashFaultError(TrainerError):
    """The exception of a crash fault."""

    def __init__(self, *, rank: int, step: int) -> None:
        super().__init__(f"crash fault: rank {rank} fails in step {step}")
        self.rank = rank
        self.step = step


class ScenarioError(ConfigError):
    """A scenario is invalid; the message names the field and says what to change."""

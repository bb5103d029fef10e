"""Faults of a simulated cluster, parsed from text (docs/simulator.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..faults.spec import SIMULATED_FAULTS, parse_faults

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..faults.spec import Fault


def parse_simulated_faults(specs: Iterable[str]) -> tuple[Fault, ...]:
    """Return the faults of texts such as ``slow-compute:rank=5,factor=1.8``, in their order.

    ``none`` adds nothing.

    Raises:
        FaultSpecError: Unknown cause, unknown, missing or repeated key, or a bad value.
    """
    return parse_faults(specs, SIMULATED_FAULTS)

from __future__ import annotations

from tests.collector.agent.conftest import _close_rigs, oracle, spool

__all__ = ["_close_rigs", "oracle", "spool"]

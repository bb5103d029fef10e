from __future__ import annotations

from tests.collector.agent.conftest import oracle, spool

__all__ = ["oracle", "spool"]

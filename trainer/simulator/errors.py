"""What the simulator raises on purpose."""

from __future__ import annotations

from ..errors import ConfigError


class ScenarioError(ConfigError):
    """A scenario cannot be simulated; the text names the field and says what to change."""

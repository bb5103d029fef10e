"""What holds for all tests: how properties are examined.

A machine may stand still while an example is drawn or tried, so no deadline holds one, and what a
submission is told depends on the submission alone: each run tries the same examples. To look for
new ones: ``make pytest ARGS="--hypothesis-profile fresh"``.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "fresh", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("steady")

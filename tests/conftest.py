"""What holds for all tests: how properties are examined, and one thread for torch.

A machine may stand still while an example is drawn or tried, so no deadline holds one, and what a
submission is told depends on the submission alone: each run tries the same examples. To look for
new ones: ``make pytest ARGS="--hypothesis-profile fresh"``.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Before torch is loaded, here and in all that a test starts: its threads spin while they wait for
# each other, and where other processes hold the cores a step takes up to a hundred times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "fresh", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("steady")

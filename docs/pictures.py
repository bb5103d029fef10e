"""Draw the proof of each cause for docs/findings.md: `make pictures`.

Each picture is what the overview, the page of an incident and a message show of a simulated run
with that fault. No browser is needed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rankscope import open_run
from rankscope.commands.simulate import simulate_run
from rankscope.dashboard.figures.static_svg import static_svg
from rankscope.simulation import SimulateOptions

FOLDER = Path(__file__).parent / "images" / "causes"


@dataclass(frozen=True, slots=True)
class Case:
    """A run that shows a cause."""

    fault: str
    num_steps: int = 24
    settings: str = ""
    """Further lines of its scenario file."""


CASES = {
    "slow-compute": Case("slow-compute:rank=5,factor=1.4,steps=8-23"),
    "clock-throttle": Case("clock-throttle:rank=5,factor=1.3,steps=3-9", num_steps=10),
    "stage-imbalance": Case("stage-imbalance:stage=1,factor=1.3"),
    "sequence-imbalance": Case("sequence-imbalance:spread=0.4", num_steps=8),
    "slow-link": Case("slow-link:src=1,dst=9,factor=8,steps=8-23"),
    "network-degradation": Case(
        "network-degradation:factor=6,share=0.5,reason=congestion,steps=8-23",
        settings="ranks_per_host = 2\n",
    ),
    "recompile": Case("recompile:rank=3,ms=300,every=4"),
    "gc-pause": Case("gc-pause:ms=200,probability=0.01,spans=yes"),
    "host-stall": Case("host-stall:rank=4,ms=6,steps=8-23"),
    "data-stall": Case("data-stall:rank=4,ms=200,steps=8-23,spans=yes"),
    "launch-skew": Case("launch-skew:ms=120,stage=1,tp=0", num_steps=32),
    "checkpoint": Case("checkpoint:every=8,ms=1500,spans=yes"),
    "evaluation": Case("evaluation:every=8,ms=1500,rank=0"),
    "layout": Case("", settings='rank_order = "dp-first"\nranks_per_host = 4\n'),
    "misconfiguration": Case("misconfiguration:rank=3,variable=NCCL_IB_DISABLE,value=1"),
    "hang": Case("hang:rank=3,step=12"),
    "crash": Case("crash:rank=3,step=12,kind=cuda-oom"),
}
"""All causes but `common-pause` and `near-oom`: the simulator records each save, and no memory."""


def draw(cause: str, case: Case, folder: Path) -> str | None:
    """Return the proof of a cause as SVG; None if the run shows no such finding, or no picture."""
    scenario = folder / f"{cause}.toml"
    scenario.write_text(
        "dp = 4\npp = 2\ntp = 2\nnum_microbatches = 4\n"
        f"num_steps = {case.num_steps}\nseed = 5\n{case.settings}"
    )
    faults = (case.fault,) if case.fault else ()
    simulate_run(SimulateOptions(scenario=str(scenario), run_id=cause, faults=faults))
    with open_run(cause) as run:
        figure = run.figure_proof(cause)
        if figure is None:
            print(f"{cause}: {run.verdict}", file=sys.stderr)
            return None
        return static_svg(figure, title=f"proof of {cause}", alone=True)


def main(causes: list[str]) -> int:
    """Write the pictures of the given causes, or of all."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    num_missing = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RANKSCOPE_STORE"] = f"chdb://{folder}/store"
        for cause in causes or CASES:
            svg = draw(cause, CASES[cause], Path(folder))
            num_missing += svg is None
            if svg is not None:
                (FOLDER / f"{cause}.svg").write_text(f"{svg}\n", encoding="utf-8")
                print(f"{cause}: {len(svg):,} bytes")
    return int(num_missing > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

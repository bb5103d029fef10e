"""Simulated runs in a store whose findings have a life: a fault in some steps, a restart."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rankscope.server.reports import Reports, find_run
from rankscope.simulation import store_simulation
from rankscope.sources.incidents import IncidentSource
from rankscope.sources.store_source import StoreSource
from rankscope.sources.stored_reports import StoredReports
from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Scenario
from rankscope.trainer.simulator.simulation import simulate

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.store.store import Store

SCENARIO = Scenario(dp=8, pp=1, tp=1, num_steps=36, ranks_per_host=2)
"""Four hosts, sim-00000 to sim-00003, of two ranks each."""

NUM_RANKS = 8

COPY = """
INSERT INTO {table} SELECT * REPLACE ({changes}) FROM (
    SELECT * FROM {table} FINAL WHERE run_id = '{source}'
)
"""


def store_run(store: Store, run_id: str, *faults: str, num_steps: int = 36) -> None:
    """Simulate a run with faults, and store it."""
    scenario = replace(SCENARIO, num_steps=num_steps, faults=parse_simulated_faults([*faults]))
    simulation = simulate(scenario, run_id=run_id)
    store_simulation(store, simulation, simulation.tables())


def restart_as(store: Store, run_id: str, source: str, *, first_step: int) -> None:
    """Add another run's rows to a run as its epoch 1, which begins with a step, a minute later."""
    (end,) = store.rows(
        "SELECT max(end_ns) AS ns FROM steps WHERE run_id = {run_id:String}", {"run_id": run_id}
    )
    (begin,) = store.rows(
        "SELECT min(start_ns) AS ns FROM steps WHERE run_id = {run_id:String}", {"run_id": source}
    )
    later_ns = end["ns"] - begin["ns"] + 60 * 10**9
    named = f"'{run_id}' AS run_id"
    epoch = f"{named}, 1 AS epoch"
    moved = f"{epoch}, step + {first_step} AS step"
    times = f"{moved}, start_ns + {later_ns} AS start_ns"
    changes = {
        "spans": f"{times}, if(launch_ns < 0, -1, launch_ns + {later_ns}) AS launch_ns",
        "steps": f"{times}, end_ns + {later_ns} AS end_ns",
        "microbatches": moved,
        **dict.fromkeys(("ranks", "runs", "groups", "ledger"), epoch),
        "manifests": named,
    }
    for table, change in changes.items():
        store.command(COPY.format(table=table, source=source, changes=change))


def analysed(store: Store, run_id: str) -> RunReport:
    """Return the report of an ended run, which is stored with its findings."""
    source = StoreSource(store)
    report = Reports(source, stored=StoredReports(store)).refresh(find_run(source, run_id))
    assert report is not None
    return report


def incident_source(store: Store, run_id: str, *, state: str = "ended") -> IncidentSource:
    """Return the source of a run's incidents, analysed before."""
    report = analysed(store, run_id)
    return IncidentSource(
        store=store, run_id=run_id, num_ranks=NUM_RANKS, state=state, report=report
    )

"""Manifests of the simulated processes, and the rows of tables runs, ranks and clock."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import NONE

from ..faults.spec import FaultCause
from .placement import host_name
from .tables import EPOCH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .cluster import Cluster
    from .ending import Ending
    from .scenario import Scenario
    from .simulation import Simulation

Row = dict[str, Any]

SOURCE_FORMAT = "rankscope"
MODEL_NAME = "simulated-gpt"
DEVICE_NAME = "NVIDIA H100 80GB HBM3"
DTYPE = "bfloat16"
PEAK_FLOPS_PER_S = 989e12
"""Dense bfloat16. Source: NVIDIA H100 SXM data sheet."""

DEVICE_BYTES, OTHER_BYTES = 80 << 30, 1 << 30
"""Memory of the device, and what driver and communication library take of it."""

COMPUTE_EFFICIENCY_RATIO = 0.6
"""FLOPs of a computing device over its peak."""

FLOPS_CONVENTION = "simulated: 60 % of the peak while a healthy device computes"
ENVIRONMENT = {
    "NCCL_ALGO": "Ring",
    "NCCL_IB_DISABLE": "0",
    "NCCL_IB_TIMEOUT": "22",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "OMP_NUM_THREADS": "8",
}
VERSIONS = {"python": "3.11", "torch": "2.13.0", "cuda": "13.0", "nccl": "2.28.3", "packages": {}}


def flops_per_token(scenario: Scenario) -> float:
    """Return the model's FLOPs per token at which a healthy device reaches its efficiency.

    ::

        efficiency * peak * pp * tp * cp * (forward + backward) / tokens
    """
    seconds = (scenario.forward_ms + scenario.backward_ms) / 1e3
    num_devices = scenario.pp * scenario.tp * scenario.cp
    peak = PEAK_FLOPS_PER_S * COMPUTE_EFFICIENCY_RATIO
    return peak * num_devices * seconds / scenario.tokens_per_microbatch


def model_row(scenario: Scenario) -> dict[str, Any]:
    """Return the entry ``model`` of the manifest."""
    return {
        "name": MODEL_NAME,
        "num_parameters": None,
        "flops_per_token": flops_per_token(scenario),
        "flops_convention": FLOPS_CONVENTION,
    }


def manifest_of(cluster: Cluster, run_id: str, rank: int) -> dict[str, Any]:
    """Return the manifest of a rank (docs/spool-format.md, manifest.json)."""
    scenario, at = cluster.scenario, cluster.placement
    return {
        "version": 1,
        "run_id": run_id,
        "epoch": EPOCH,
        "rank": rank,
        "world_size": scenario.world_size,
        "local_rank": int(at.local_rank[rank]),
        "pid": NONE,
        "host": host_name(int(at.host[rank])),
        "pod": None,
        "process_uuid": None,
        "boot_id": None,
        "started_ns": scenario.started_ns,
        "layout": scenario.layout.to_dict(),
        "coords": coords_of(cluster, rank),
        "device": {
            "name": DEVICE_NAME,
            "uuid": None,
            "dtype": DTYPE,
            "peak_flops_per_s": PEAK_FLOPS_PER_S,
        },
        "model": model_row(scenario),
        "paced": None,
        "git": None,
        "config": scenario.to_dict(),
        "seeds": {"simulation": scenario.seed},
        "environment": environment_of(cluster, rank),
        "versions": VERSIONS,
        "hosts": None,
    }


def coords_of(cluster: Cluster, rank: int) -> dict[str, int]:
    """Return the rank's position on each axis."""
    at, dp = cluster.placement, int(cluster.placement.dp[rank])
    of_rank = {"dp": dp, "tp": at.tp[rank], "pp": at.stage[rank], "cp": at.cp[rank]}
    return {axis: int(place) for axis, place in of_rank.items()} | {"ep": dp % cluster.scenario.ep}


def environment_of(cluster: Cluster, rank: int) -> dict[str, str]:
    """Return the rank's environment variables, with those of a misconfiguration."""
    differing = {
        fault.variable: fault.value
        for fault in cluster.scenario.faults
        if fault.cause is FaultCause.MISCONFIGURATION and rank in fault.ranks
    }
    return ENVIRONMENT | differing


def run_row(simulation: Simulation, *, created_ns: int) -> Row:
    """Return the row of table ``runs``."""
    scenario = simulation.scenario
    return {
        "run_id": simulation.run_id,
        "epoch": EPOCH,
        "created_ns": created_ns,
        "started_ns": scenario.started_ns,
        "ended_ns": simulation.ended_ns,
        "state": run_state(simulation.ending),
        "source_format": SOURCE_FORMAT,
        "world_size": scenario.world_size,
        "layout": scenario.layout.to_dict(),
        "model": json.dumps(model_row(scenario)),
        "flops_per_token": flops_per_token(scenario),
        "flops_convention": FLOPS_CONVENTION,
        "paced": "",
        "manifest": json.dumps(simulation.manifest(0)),
        "revision": 1,
    }


def rank_rows(simulation: Simulation) -> Iterator[Row]:
    """Yield the rows of table ``ranks``, without the hash of the manifest."""
    scenario, at, ending = simulation.scenario, simulation.cluster.placement, simulation.ending
    for rank in range(scenario.world_size):
        host, rack = int(at.host[rank]), int(at.rack[rank])
        exit_ns = simulation.ended_ns
        if ending is not None and not ending.is_hang:
            exit_ns = scenario.started_ns + int(ending.last_seen[rank])
        yield {
            "run_id": simulation.run_id,
            "epoch": EPOCH,
            "rank": rank,
            "process": simulation.process,
            "host": host_name(host),
            "boot_id": boot_id_of(host, simulation.process),
            "local_rank": int(at.local_rank[rank]),
            "pod": "",
            "device_uuid": f"GPU-{rank:08x}",
            "device_name": DEVICE_NAME,
            "dtype": DTYPE,
            "peak_flops_per_s": PEAK_FLOPS_PER_S,
            "memory": memory_of(scenario),
            **coords_of(simulation.cluster, rank),
            "switch": f"leaf-{rack:04d}",
            "rack": f"rack-{rack:04d}",
            "rail": f"rail-{at.local_rank[rank]}",
            "pid": NONE,
            "started_ns": scenario.started_ns,
            "exit_state": run_state(ending),
            "exit_ns": exit_ns,
            "dropped": {},
            "revision": 1,
        }


def memory_of(scenario: Scenario) -> str:
    """Return the rank's column ``memory``: bfloat16 parameters, all else float32.

    With gradients of 2 N bytes in bfloat16, parameters take 2 N, gradients 4 N, and the optimizer
    12 N: a copy of the parameters and two moments.
    """
    parameters = scenario.gradient_bytes
    sizes = {
        "device_bytes": DEVICE_BYTES,
        "other_bytes": OTHER_BYTES,
        "parameter_bytes": parameters,
        "gradient_bytes": 2 * parameters,
        "optimizer_bytes": 6 * parameters,
    }
    return json.dumps(sizes)


def clock_rows(simulation: Simulation) -> Iterator[Row]:
    """Yield the rows of table ``clock``: aligned clocks, with their error bound."""
    scenario = simulation.scenario
    for host in range(scenario.num_hosts):
        yield {
            "host": host_name(host),
            "boot_id": boot_id_of(host, simulation.process),
            "at_ns": scenario.started_ns,
            "offset_ns": 0,
            "drift_ppb": 0,
            "clock_error_ns": scenario.noise.clock_error_ns // 2,
        }


def boot_id_of(host: int, process: str) -> str:
    """Return the boot id of a host; it differs between simulations, as their clocks do."""
    return hashlib.blake2b(f"{process} {host}".encode(), digest_size=16).hexdigest()


def run_state(ending: Ending | None) -> str:
    """Return the state of a run; a job that hangs is still running."""
    if ending is None:
        return "ended"
    return "running" if ending.is_hang else "failed"

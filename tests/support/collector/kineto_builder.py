"""Builder of a trace of `torch.profiler` on a device with NCCL, as Kineto writes its events."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

MAIN, AUTOGRAD = 100, 200
COMPUTE_STREAM, COMM_STREAM = 7, 20
BASE_NS = 1_700_000_000_000_000_000
US_PER_MS = 1000.0


class TraceBuilder:
    """Events of one rank. Times are ms from the trace's begin.

    Attributes:
        backend: Backend of the job; with gloo, it has no device.
    """

    backend = "nccl"

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        groups: dict[str, tuple[str, tuple[int, ...]]] | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        everyone = {"0": ("default_pg", tuple(range(world_size)))}
        self.groups = everyone if groups is None else groups
        self.events: list[dict[str, Any]] = []
        self._correlation = 0

    def add(self, name: str, cat: str, begin: float, end: float, *, tid: int, **args: Any) -> None:  # noqa: ANN401
        """Add an event."""
        ts, dur = begin * US_PER_MS, (end - begin) * US_PER_MS
        event = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur}
        self.events.append({**event, "args": args})

    def kernel(
        self,
        name: str,
        begin: float,
        end: float,
        *,
        launch: float | None = None,
        tid: int = MAIN,
        stream: int = COMPUTE_STREAM,
        **args: Any,  # noqa: ANN401
    ) -> None:
        """Add a kernel and its launch, 1 ms before its begin by default."""
        self._correlation += 1
        at = begin - 1 if launch is None else launch
        args["correlation"] = number = self._correlation
        self.add("launch", "cuda_runtime", at, at + 0.005, tid=tid, correlation=number)
        self.add(name, "kernel", begin, end, tid=stream, stream=stream, **args)

    def comm(
        self,
        name: str,
        begin: float,
        end: float,
        *,
        launch: float | None = None,
        group: str = "0",
        **args: Any,  # noqa: ANN401
    ) -> None:
        """Add a kernel of NCCL."""
        about: dict[str, Any] = {
            "Collective name": name,
            "dtype": "BFloat16",
            "In msg nelems": 1000,
        }
        about |= {"Out msg nelems": 1000, "Process Group Name": group, **args}
        self.kernel(f"ncclDevKernel_{name}", begin, end, launch=launch, stream=COMM_STREAM, **about)

    def step(self, number: int, begin: float, end: float) -> None:
        """Add a step on the host, and its copy on the device."""
        self.add(f"ProfilerStep#{number}", "user_annotation", begin, end, tid=MAIN)
        self.add(f"ProfilerStep#{number}", "gpu_user_annotation", begin + 1, end + 1, tid=7)

    def backward(self, begin: float, end: float) -> None:
        """Add a region in which the autograd engine launches."""
        name = "autograd::engine::evaluate_function: MmBackward0"
        self.add(name, "cpu_op", begin, end, tid=AUTOGRAD)

    def document(self) -> dict[str, Any]:
        """Return the whole trace."""
        config = [
            {"pg_name": name, "pg_desc": described, "ranks": list(members)}
            for name, (described, members) in self.groups.items()
        ]
        devices = [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}] if self.backend == "nccl" else []
        about = {"backend": self.backend, "rank": self.rank, "world_size": self.world_size}
        return {
            "schemaVersion": 1,
            "deviceProperties": devices,
            "distributedInfo": {**about, "pg_count": len(config), "pg_config": config},
            "host_name": f"host-{self.rank // 8}",
            "baseTimeNanoseconds": BASE_NS,
            "traceEvents": [{"ph": "M", "name": "process_name", "pid": 1}, *self.events],
        }

    def write(self, folder: Path) -> Path:
        """Write the file of this rank."""
        path = folder / f"rank{self.rank}.json"
        path.write_text(json.dumps(self.document()))
        return path

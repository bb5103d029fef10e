"""Cost and accuracy of device timing on the GPU of this machine.

    python benchmarks/gpu_tracer.py > result.json
    python benchmarks/gpu_tracer.py --fake        without a GPU, on the fake device of the tests

Prints one JSON document; needs torch and this repository only. One GPU is enough: the communication
group then has one member, and the overlap is measured with kernels on two streams. It ends within 8
minutes: every part runs in its own process with a timeout, and a timeout is reported in the result.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

NO_GPU = "no GPU run has been made yet: this machine has none"
RUNS = (
    ("steps", "steps", None, 190),
    ("overlap, default connections", "overlap", None, 40),
    ("overlap, 1 connection", "overlap", "1", 40),
    ("mapping", "mapping", None, 150),
    ("cost", "cost", None, 30),
)
"""Name, part, ``CUDA_DEVICE_MAX_CONNECTIONS``, timeout in seconds: 450 in total."""


def main() -> int:
    """Measure and print the result; return 1 if there is no GPU or a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fake", action="store_true", help="on the tests' fake device")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        return run_part(options.part, fake=options.fake)
    document = describe(fake=options.fake)
    if document["gpu"] is not None:
        document["parts"] = {
            name: run_child(part, connections, timeout_s, fake=options.fake)
            for name, part, connections, timeout_s in RUNS
        }
    json.dump(document, sys.stdout, indent=1)
    sys.stdout.write("\n")
    parts = document.get("parts")
    return int(not isinstance(parts, dict) or any("error" in part for part in parts.values()))


def run_child(
    part: str, connections: str | None, timeout_s: int, *, fake: bool
) -> dict[str, object]:
    """Return the result of a part, or its error."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("RANKSCOPE_")}
    environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if connections is not None:
        environ["CUDA_DEVICE_MAX_CONNECTIONS"] = connections
    command = [sys.executable, __file__, "--part", part, *(["--fake"] if fake else [])]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout_s} s"}
    if done.returncode != 0:
        return {"error": done.stderr.strip()[-2_000:] or f"exit code {done.returncode}"}
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_part(part: str, *, fake: bool) -> int:
    """Measure one part in this process and print one line."""
    from benchmarks.gpu_parts import PARTS
    from benchmarks.gpu_rig import CudaRig, FakeRig

    connections = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8"))
    rig = FakeRig(connections) if fake else CudaRig()
    print(json.dumps(PARTS[part](rig, fake=fake)))
    return 0


def describe(*, fake: bool) -> dict[str, object]:
    """Return device, driver and versions."""
    import torch

    gpu: str | None = None
    if fake:
        gpu = "fake"
    elif torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
    document: dict[str, object] = {
        "gpu": gpu,
        "num_gpus": torch.cuda.device_count(),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),
        "nccl": nccl_version(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "at": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
    }
    if fake:
        document["note"] = "a trial of the script on a fake device: the numbers measure nothing"
    elif gpu is None:
        document["note"] = NO_GPU
    return document


def driver_version() -> str | None:
    """Return the version of the driver; None if unknown."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


def nccl_version() -> str | None:
    """Return the version of the NCCL that torch was built with; None without."""
    import torch

    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


if __name__ == "__main__":
    sys.exit(main())

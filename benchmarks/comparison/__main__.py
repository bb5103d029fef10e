"""The same job with the same faults under several tools: what each says.

    python -m benchmarks.comparison OUT [--peers VENV] [--hta VENV] [--prefix "chrt -r 1"]
                                    [--only TOOL ...] [--cases CASE ...]

`VENV/bin` has the tools: `pip install torch==2.13.0 traceml-ai nvidia-resiliency-ext wandb` into
one, `pip install HolisticTraceAnalysis "pandas<3"` into the other. The whole output of each command
is in OUT, one file a case and tool; `docs/comparison.md` quotes from them. A command that fails is
part of the result. `--prefix` goes before each job, for a machine with other work.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
JOB = str(HERE / "job.py")
CASES = {
    "healthy": [],
    "slow-compute": ["--fault", "slow-compute"],
    "slow-loader": ["--fault", "slow-loader"],
    "hang": ["--fault", "hang"],
    "pipeline": ["--pipeline", "--fault", "slow-compute"],
}
TORCHRUN = ["torchrun", "--nproc-per-node", "4"]
ONLY = {
    "flight-recorder": ["hang"],
    "hta": ["slow-compute"],
    "profiler": ["healthy", "slow-compute", "slow-loader", "pipeline"],
}
"""Cases of the tools that are not run on all. HTA needs kernels: it reads the made files of the
tests, in which rank 2 computes 1.4 times as long."""

TIMEOUT_S = {"rankscope": "100"}
"""Of a collective of a job that hangs. rankscope reports a hang after a minute without a record."""


def commands(tool: str, case: str, out: Path, args: argparse.Namespace) -> list[list[str]]:
    """Return what a user of the tool types, in order."""
    prefix, fault = shlex.split(args.prefix), CASES[case]
    job = [*prefix, *TORCHRUN, JOB, *fault]
    peers, hta = f"{args.peers}/bin", f"{args.hta}/bin"
    traces = str(out / f"{tool}-{case}")
    folder = str(HERE)
    match tool:
        case "rankscope":
            return [["rankscope", "run", "--name", case, *job], ["rankscope", "analyze", case]]
        case "profiler":
            imported = f"{case}-kineto"
            return [
                [*job, "--tool", tool],
                ["cat", f"{traces}/table0.txt", f"{traces}/table2.txt"],
                [f"{hta}/python", f"{folder}/read_hta.py", traces],
                ["rankscope", "import", traces, "--format", "kineto", "--run", imported],
                ["rankscope", "analyze", imported],
            ]
        case "hta":
            kernels = "tests/cases/profiles/01-torch-before-2.4"
            read = [f"{hta}/python", f"{folder}/read_hta.py"]
            imported = "kernels"
            return [
                [*read, kernels],
                [*read, "tests/cases/profiles/00-control"],
                ["rankscope", "import", kernels, "--format", "kineto", "--run", imported],
                ["rankscope", "analyze", imported],
            ]
        case "flight-recorder":
            imported = f"{case}-dumps"
            read = [sys.executable, f"{folder}/read_flight_recorder.py", traces]
            analyze = ["torchfrtrace", f"{traces}/pickles", "-p", "rank_"]
            return [
                [*job, "--tool", tool],
                [*read, "--as-written"],
                analyze,
                read,
                analyze,
                ["rankscope", "import", traces, "--format", tool, "--run", imported],
                ["rankscope", "analyze", imported],
            ]
        case "traceml":
            logs = ["--logs-dir", traces, "--run-name", case, "--no-save-training-output"]
            run = [f"{peers}/traceml", "run", "--nproc-per-node", "4", *logs, JOB]
            return [[*prefix, *run, "--args", "--tool", tool, *fault]]
        case _:
            run = [*prefix, f"{peers}/python", "-m", "torch.distributed.run", *TORCHRUN[1:], JOB]
            return [[*run, *fault, "--tool", tool]]


def main() -> None:
    """Run the tools that were asked for over all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--peers", default=sys.prefix)
    parser.add_argument("--hta", default=sys.prefix)
    parser.add_argument("--prefix", default="")
    tools = ["rankscope", "profiler", "hta", "traceml", "nvrx", "wandb", "flight-recorder"]
    parser.add_argument("--only", nargs="+", default=tools, choices=tools)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for tool in args.only:
        for case in args.cases:
            if case not in ONLY.get(tool, CASES):
                continue
            environment = os.environ | {
                "COMPARISON_OUT": str(out / f"{tool}-{case}"),
                "OMP_NUM_THREADS": "1",
                "RANKSCOPE_STORE": f"chdb://{out}/store",
                "TORCH_FR_BUFFER_SIZE": "2000",
                "TIMEOUT": TIMEOUT_S.get(tool, "45") if case == "hang" else "600",
            }
            with (out / f"{tool}-{case}.txt").open("w") as file:
                for command in commands(tool, case, out, args):
                    print("$", shlex.join(command), file=file, flush=True)
                    started = time.monotonic()
                    done = subprocess.run(
                        command, env=environment, stdout=file, stderr=file, check=False, timeout=400
                    )
                    took = time.monotonic() - started
                    print(f"# status {done.returncode}, {took:.0f} s", file=file, flush=True)
            print(tool, case, flush=True)


if __name__ == "__main__":
    main()

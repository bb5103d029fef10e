"""Public files of torch.profiler, imported and analysed, beside an independent count.

The counts come from the JSON alone and share no code with the importer: steps are the
annotations ``ProfilerStep#N``, compute the union of kernels whose names do not say that they
communicate, exposed communication and copies what they cover besides, idle the rest from the first
kernel to the last. A file is wrong if a share differs by two points, if steps are missing, or if it
is refused although it has kernels and steps.

    python -m benchmarks.public_profiles FOLDER > benchmarks/results/public-profiles.md

Each file of the folder is a job of its own, and each folder whose name ends in ``.job`` is one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.verdict import verdict_sentence
from rankscope.collector.errors import CollectorError
from rankscope.collector.store.store import open_store
from rankscope.commands.import_trace import import_files
from rankscope.errors import BadInputError
from rankscope.sources.store_source import StoreSource

COMM = re.compile(
    r"\b(?:nccl|rccl)|cross_device_reduce|quickreduce|all_?reduce|mori|deep_ep", re.IGNORECASE
)
KERNELS = {"kernel": "kernel", "Kernel": "kernel"} | dict.fromkeys(
    ("gpu_memcpy", "gpu_memset", "Memcpy", "Memset"), "copy"
)
TOLERANCE = 2.0
"""Points of a share."""

COLUMNS = ("file", "kernels", "steps", "counted", "imported", "outcome", "verdict or reason")


@dataclass(kw_only=True)
class Counts:
    """Independent counts of a trace; times in us."""

    kernels: int = 0
    num_steps: int = 0
    is_profile: bool = False
    shares: tuple[float, ...] = ()
    """Compute, communication and copies outside of it, idle; percent of all ranks."""

    names: Counter[str] = field(default_factory=Counter)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="pattern of the names of the files")
    arguments = parser.parse_args()
    rows = []
    for path in sorted(find_cases(arguments.folder)):
        name = str(path.relative_to(arguments.folder))
        if re.search(arguments.only, name):
            rows.append((name, *judge(path)))
            print(*rows[-1], sep="\t", file=sys.stderr, flush=True)
    outcomes = Counter(row[5].split(":")[0] for row in rows)
    print(f"{len(rows)} jobs: {', '.join(f'{num} {name}' for name, num in outcomes.items())}\n")
    print(f"| {' | '.join(COLUMNS)} |\n| {' | '.join(['---'] * len(COLUMNS))} |")
    for row in rows:
        print(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |")


def find_cases(folder: Path) -> list[Path]:
    """Return the files and the folders that are one job."""
    return [
        path
        for path in folder.rglob("*")
        if (path.is_file() or path.name.endswith(".job"))
        and not any(parent.name.endswith(".job") for parent in path.parents)
    ]


def judge(path: Path) -> tuple[str, ...]:
    """Return the cells of a trace, from the number of its kernels on."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) or [path]
    counts = count_events(files)
    counted = " ".join(f"{share:.1f}" for share in counts.shares)
    head = (f"{counts.kernels:,}", f"{counts.num_steps}", counted)
    options: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        url = f"chdb://{folder}/store"
        for _ in range(3):
            try:
                import_files([path], file_format="kineto", run_id="run", store_url=url, **options)
                break
            except (BadInputError, CollectorError) as error:
                text = str(error).replace(str(path), "").strip()
                if "--step-name" in text and "step_name" not in options:
                    options["step_name"] = "all"
                elif "--rank" in text and "rank" not in options:
                    options["rank"] = 0
                else:
                    right = not counts.kernels
                    return (*head, "", "refused" if right else "refused: has kernels", text[:160])
        with open_store(url) as store:
            report = analyze_run(StoreSource(store), "run")
            num_steps = len(set(StoreSource(store).steps("run").step.tolist()))
    asked = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
    document, said = report.device_time, verdict_sentence(report)[:160]
    if document is None or document.file_ratio is None:
        return (*head, "", "read: no device time", f"{asked} {said}".strip())
    parts = document.file_ratio
    idle = sum(share for part, share in parts.items() if part.startswith("idle"))
    shares = (100 * parts["compute"], 100 * (1 - parts["compute"] - idle), 100 * idle)
    read = " ".join(f"{share:.1f}" for share in shares)
    is_near = all(
        abs(ours - theirs) <= TOLERANCE for ours, theirs in zip(shares, counts.shares, strict=False)
    )
    is_right = is_near and num_steps >= (0 if options else counts.num_steps)
    return (*head, read, "read" if is_right else "wrong", f"{asked} {said}".strip())


def count_events(files: list[Path]) -> Counts:
    """Return the counts of the files of a job."""
    counts, totals = Counts(), [0.0, 0.0, 0.0]
    steps: set[str] = set()
    for file in files:
        events = read_events(file)
        kinds: dict[str, list[tuple[float, float]]] = {"kernel": [], "comm": [], "copy": []}
        for event in events:
            if event.get("ph") != "X" or not isinstance(event.get("dur"), int | float):
                continue
            name, begin = str(event.get("name")), float(event["ts"])
            if re.fullmatch(r"ProfilerStep#\d+", name):
                steps.add(name)
            if kind := KERNELS.get(str(event.get("cat"))):
                kind = "comm" if kind == "kernel" and COMM.search(name) else kind
                kinds[kind].append((begin, begin + event["dur"]))
                counts.kernels += 1
        whole = [row for rows in kinds.values() for row in rows]
        if whole:
            length = max(end for _, end in whole) - min(begin for begin, _ in whole)
            compute, busy = covered(kinds["kernel"]), covered(whole)
            for at, part in enumerate((compute, busy - compute, length - busy)):
                totals[at] += part
    counts.num_steps = len(steps)
    if sum(totals):
        counts.shares = tuple(100 * part / sum(totals) for part in totals)
    return counts


def read_events(file: Path) -> list[dict[str, Any]]:
    """Return the events of a file; none of one that is no JSON."""
    content = file.read_bytes()
    try:
        content = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
        document = json.loads(content.decode("utf-8", "replace"), strict=False)
    except (ValueError, OSError, EOFError):
        return []
    events = document.get("traceEvents") if isinstance(document, dict) else None
    return [event for event in events or () if isinstance(event, dict)]


def covered(rows: list[tuple[float, float]]) -> float:
    """Return how much time intervals cover, by their sorted borders."""
    borders = sorted([(begin, 1) for begin, _ in rows] + [(end, -1) for _, end in rows])
    total, depth = 0.0, 0
    for (at, change), (following, _) in pairwise(borders):
        depth += change
        total += (following - at) if depth else 0.0
    return total


if __name__ == "__main__":
    main()

"""A traced process that records as many spans as it is told to, each with a name of its own.

``python -m tests.faults.writing_rank ORACLE`` reads a number a line and answers with the number of
all spans so far. What it records is noted in the oracle first. Ends with its input.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from rankscope import tracer
from tests.faults.checker import Oracle, content_hash, key_of


def main() -> None:
    """Record what is asked for."""
    gc.disable()  # a pause would be a span that nobody noted
    rank, num_spans = int(os.environ["RANK"]), 0
    tracer.install()
    with Oracle(Path(sys.argv[1]), is_synced=False) as oracle:
        for line in sys.stdin:
            for _ in range(int(line)):
                name = f"s{rank}-{num_spans}"
                oracle.attempt(key_of(rank, name), content_hash(name, "host"))
                with tracer.span(name):
                    num_spans += 1
            sys.stdout.write(f"{num_spans}\n")
            sys.stdout.flush()
    tracer.shutdown()


if __name__ == "__main__":
    main()

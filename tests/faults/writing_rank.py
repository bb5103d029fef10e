"""A traced process that records a requested number of spans, each with its own name.

``python -m tests.faults.writing_rank ORACLE`` reads one number per line and answers with the number
of all spans so far. Spans are written to the oracle first. It ends with its input.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from rankscope import tracer
from tests.faults.checker import Oracle, content_hash, key_of


def main() -> None:
    """Record the requested spans."""
    gc.disable()  # A collection would be a span that is not in the oracle.
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

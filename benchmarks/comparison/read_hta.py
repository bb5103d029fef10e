"""Print what HolisticTraceAnalysis says of a folder of torch.profiler's files.

python read_hta.py FOLDER
"""

from __future__ import annotations

import sys

from hta.trace_analysis import TraceAnalysis

if __name__ == "__main__":
    analysis = TraceAnalysis(trace_dir=sys.argv[1])
    for name, arguments in (
        ("get_potential_stragglers", {"num_candidates": 1}),
        ("get_potential_stragglers", {}),
        ("get_temporal_breakdown", {"visualize": False}),
        ("get_comm_comp_overlap", {"visualize": False}),
    ):
        try:
            print(name, arguments, getattr(analysis, name)(**arguments), sep="\n", flush=True)
        except Exception as error:  # noqa: BLE001, this is what a user would see
            print(name, f"{type(error).__name__}: {error}", sep="\n", flush=True)

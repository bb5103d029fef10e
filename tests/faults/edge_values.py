"""Values at and beyond the edge of what a description or a record may say, one in each run."""

from __future__ import annotations

import json
import math
import random
from typing import TYPE_CHECKING, Any

from .edge_run import DEEP, DEEP_TEXT, Edge, Way

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST32, MOST64, UNSIGNED64 = 2**31 - 1, 2**63 - 1, 2**64 - 1
LEAST64 = -(2**63)
LARGE, BEYOND = 2**20, 2**20 + 1
LONG = "x" * 10_000
HUGE_TEXT = json.dumps({"name": "x" * (1 << 20)})

SIZES: tuple[Any, ...] = (
    -5, 0, 1, 7, LARGE, BEYOND, 200_000_000, MOST32, True, "8", 2.5, [], {}, None, DEEP,
)  # fmt: skip
FEW_SIZES: tuple[Any, ...] = (-5, 0, LARGE, 200_000_000, MOST32)
LAYOUTS: tuple[Any, ...] = (
    None, [], "dp", {}, DEEP, {"dp": LARGE, "tp": LARGE}, {"dp": MOST32, "pp": MOST32},
    {"dp": 1}, {"zz": 3}, {"": 2}, {f"axis{number}": 2 for number in range(600)},
)  # fmt: skip
WORLD_SIZES = (0, -1, 1, 3, 5, 1_000_000, 2**24, 2**24 + 1, MOST32, "4", None, True)
TIMES = (0, -1, LEAST64, 2**62, MOST64, None)
NAMES: tuple[Any, ...] = (
    "", LONG, "a\u202eb", "nul\0nul", "\ud800", "\x1b[31mred", "../../etc", "=1+1", None, 5, DEEP,
)  # fmt: skip
FEW_NAMES = ("", LONG, "nul\0nul", "\u202e", None)
STATES = ("", "paused", "RUNNING", "running", "lost", LONG, None)
FLOPS = (0, -1, 5e-324, 1e-308, 1e308, None, "x", True)

MODELS = (
    "null", "", "[]", "3", '"x"', "true", "not json", "NaN", "{", DEEP_TEXT, HUGE_TEXT,
    '{"name": 5}', '{"name": null}', '{"name": []}', '{"name": {"a": 1}}', '{"1": 2}',
    '{"name": "a", "name": "b"}', '{"name": "\\ud800"}', f'{{"num_parameters": 1{"0" * 400}}}',
    *(
        f'{{"name": "m", "flops_per_squared_length": {number}}}'
        for number in ("-1", "0", "1e308", "1e999", "NaN", '"NaN"', "[]", "{}", "true", "null")
    ),
    '{"name": "m", "flops_per_token": 1e308}',
)  # fmt: skip
PACED = ("null", "[]", "3", "true", "{}", "not json", '{"a": 1e999}', DEEP_TEXT, HUGE_TEXT)
MEMBERS: tuple[Any, ...] = (
    [-1, -2], [], [0, 0, 0, 0], [0], [7, 8], list(range(100)), list(range(65_536)), [2**24],
    [MOST32], [2**40], [1.5], ["a"], None, "0,1", {}, DEEP,
)  # fmt: skip
GROUP_IDS = (0, 1, UNSIGNED64, -1, None, "x")
KINDS = ("", "nope", "other", "wait", "forward", LONG, None)

EVENT_KINDS = ("pace", "exit", "lost", "stalled", "stack", "recompile", "checkpoint", "profile")
EVENT_DATA = ("", "null", "[]", "3", "not json", DEEP_TEXT)
EVENTS: tuple[tuple[str, str], ...] = (
    ("pace", '{"num_segments": "x", "num_overruns": 1}'),
    ("pace", '{"num_segments": 1, "num_overruns": "x"}'),
    ("pace", '{"num_segments": 1}'),
    ("pace", '{"num_segments": 1e-320, "num_overruns": 1e308}'),
    ("exit", '{"exception": 5}'),
    ("exit", '{"exception": "x", "step": "y"}'),
    ("exit", '{"exception": []}'),
    ("exit", '{"exception": {"type": [], "message": {}, "traceback": 5, "contexts": {}}}'),
    ("exit", '{"exception": {"contexts": [5]}, "at_error_ns": 1e400, "recorded_ns": -1}'),
    ("exit", f'{{"step": {10**30}, "recorded_ns": {10**30}, "at_error_ns": {-(10**30)}}}'),
    ("lost", '{"open": 5, "step": null}'),
    ("lost", '{"open": [5, null, {"kind": 5, "name": []}], "step": -9}'),
    ("stalled", '{"open": {"a": 1}, "step": "x", "seconds": "y"}'),
    ("stalled", '{"open": [{"kind": "nope", "group_id": "zz", "seq": []}], "step": 1e400}'),
    ("stalled", f'{{"open": [{{"kind": "dp-comm", "group_id": {10**30}}}], "step": 3}}'),
    ("stack", '{"step": "x", "threads": 5}'),
    ("stack", '{"step": null, "threads": [{"frames": [[], 5]}]}'),
    ("recompile", '{"step": "x", "compile_id": []}'),
    ("recompile", '{"step": [], "seconds": "x"}'),
    ("alert", "not json"),
    ("alert", "{}"),
    ("alert", '{"rule": "x", "key": "y", "first_step": "a", "last_step": []}'),
    ("alert", '{"rule": "x", "first_step": 1, "last_step": 2, "ranks": 5, "hosts": null}'),
    ("alert", '{"rule": 5, "first_step": 1, "last_step": 2, "severity": [], "post": 7}'),
    ("alert-resolved", "null"),
    ("alert-acknowledged", '{"rule": "x"}'),
    ("alert-delivery", '{"rule": "x", "receiver": [], "state": {}, "delivery": "nope"}'),
    ("alert-silence", "null"),
    ("alert-silence", '{"name": "x"}'),
    ("alert-silence", f'{{"name": "x", "until_ns": {MOST64}, "at_ns": 0}}'),
    ("alert-silence", '{"name": [], "until_ns": "x", "at_ns": null}'),
    ("alert-silence", f'{{"name": "x", "until_ns": {MOST64}, "at_ns": 0, "more": 1}}'),
)


FORGED = {"epoch": -1, "process": "rankscope-x"}
"""Columns of an event that rankscope itself writes."""

COUNTS: tuple[Any, ...] = (
    {"x": UNSIGNED64}, {"": 1}, {str(number): 1 for number in range(600)}, [], None,
)  # fmt: skip
SETTINGS: tuple[Any, ...] = (
    {}, {"layout.dp": DEEP}, {"": ""}, {"layout": "x" * (1 << 20)}, [], None,
)  # fmt: skip
ODD_MODELS: tuple[Any, ...] = (
    None, [], "null", 3, {}, {"name": 5}, {"name": []}, {"1": {"2": 3}}, DEEP,
)  # fmt: skip
ODD_NUMBERS: tuple[Any, ...] = (0, -1, 1e308, math.inf, math.nan, 10**400, "NaN", [], True)
ODD_TIMES: tuple[Any, ...] = (*TIMES, "x", 10**30)
ODD_EXCEPTIONS: tuple[Any, ...] = (
    5, "x", [], {"type": 5, "message": []}, {"traceback": 5, "contexts": 7}, DEEP,
)  # fmt: skip

Values = tuple[tuple[str, str, tuple[Any, ...]], ...]
"""Table or file, its columns with the keys below them, and the values of each."""

ROWS: Values = (
    ("runs", "layout.dp layout.pp", SIZES),
    ("runs", "layout.tp layout.vpp", FEW_SIZES),
    ("runs", "layout", LAYOUTS),
    ("runs", "world_size", WORLD_SIZES),
    ("runs", "model", MODELS),
    ("runs", "paced", PACED),
    ("runs", "manifest", ("null", "not json", DEEP_TEXT)),
    ("runs", "created_ns started_ns ended_ns", TIMES),
    ("runs", "state", STATES),
    ("runs", "source_format", ("", "nonsense", "bytedance", "kineto")),
    ("runs", "flops_per_token", FLOPS),
    ("runs", "flops_convention", ("", LONG, None)),
    ("runs", "revision", (0, MOST64, 2**63, -1)),
    ("runs", "epoch", (-1, 1, MOST32)),
    ("ranks", "dp pp tp ep", (-5, LARGE, MOST32)),
    ("ranks", "local_rank pid", (-5, MOST32, None)),
    ("ranks", "peak_flops_per_s", FLOPS),
    ("ranks", "process boot_id device_name manifest_hash", FEW_NAMES),
    ("groups", "members", MEMBERS),
    ("groups", "kind", KINDS),
    ("groups", "name", FEW_NAMES),
    ("manifests", "settings", SETTINGS),
    ("events", "at_ns", TIMES),
    ("events", "rank", (-5, 2**24, MOST32)),
    ("events", "line", (LEAST64, MOST64)),
    ("events", "text", ("\0\x1b[31m", "x" * (1 << 20), None)),
    ("clock", "offset_ns drift_ppb clock_error_ns", (-(2**62), 2**62, MOST64)),
    ("clock", "at_ns", (LEAST64, 0, MOST64)),
    ("samples", "value", (1e308, -1e308, 5e-324, 0, None, "x")),
    ("samples", "device", (-1, -(2**31), MOST32)),
    ("samples", "at_ns", TIMES),
    ("samples", "name run_id", ("", "nonsense", LONG)),
    ("heartbeats", "rank", (-5, 2**24, MOST32)),
    ("heartbeats", "step epoch", (-1, MOST32)),
    ("heartbeats", "at_ns", (0, LEAST64, MOST64)),
    ("heartbeats", "state", ("", "nope", "running")),
    ("heartbeats", "rdma_sent_bytes", (-1, MOST64)),
)
ONE_ROW: Values = (
    ("ranks", "rank", (-5, -1, 4, 2**24, MOST32, "0")),
    ("ranks", "epoch", (-1, 1, MOST32)),
    ("ranks", "dp pp", (-5, -1, 2, LARGE, MOST32)),
    ("ranks", "started_ns exit_ns", TIMES),
    ("ranks", "exit_state", STATES),
    ("ranks", "produced", (0, UNSIGNED64, -1)),
    ("ranks", "dropped", COUNTS),
    ("ranks", "host", NAMES),
    ("groups", "group_id", GROUP_IDS),
)
WIRE: Values = (
    ("spans", "launch_ns", (LEAST64, 0, MOST64)),
    ("spans", "interval_id", (LEAST64, 1, MOST64)),
    ("spans", "flags depth", (0, 32_767)),
    ("spans", "kind", ("", "nope", "wait", "other", "gc", "pp-send")),
    ("spans", "name track", ("", LONG, "nul\0nul", "__other__")),
    ("steps", "peak_memory_bytes peak_reserved_bytes num_alloc_retries", (LEAST64, MOST64)),
    ("microbatches", "microbatch", (-5, MOST32)),
    ("key", "epoch", (1, MOST32)),
    ("key", "rank", (0, 2**24, MOST32)),
    ("key", "segment", (0, UNSIGNED64)),
)
WIRE_OR_ONE_ROW: Values = (
    ("spans", "step", (-1, -7, MOST32)),
    ("spans", "rank", (4, 2**24, MOST32)),
    ("spans", "microbatch chunk", (-5, LARGE, MOST32)),
    ("spans", "seq", (-5, LEAST64, MOST64)),
    ("spans", "group_id", (0, UNSIGNED64)),
    ("spans", "start_ns", (0, 2**62, MOST64)),
    ("spans", "duration_ns", (0, 30 * 86_400 * 10**9, MOST64)),
    ("spans", "num_bytes", (-5, 0, MOST64)),
    ("spans", "src_rank dst_rank", (-5, 9, MOST32)),
    ("steps", "step", (-1, MOST32)),
    ("steps", "start_ns", (0, 2**62)),
    ("steps", "end_ns", (0, MOST64)),
    ("steps", "num_tokens", (0, LEAST64, MOST64)),
    ("steps", "loss", (math.nan, math.inf, -math.inf, 1e308)),
    ("microbatches", "num_tokens", (0, LEAST64, MOST64)),
    ("microbatches", "sum_squared_lengths sum_windowed_lengths num_elements", (0, LEAST64, MOST64)),
)
SPOOLS: Values = (
    ("manifest", "layout.dp layout.pp", SIZES),
    ("manifest", "layout", LAYOUTS),
    ("manifest", "derived.layout derived", LAYOUTS[:6]),
    ("manifest", "coords.dp coords.pp", (-5, 2, LARGE, MOST32, "0", None)),
    ("manifest", "model", ODD_MODELS),
    ("manifest", "model.flops_per_token model.flops_per_squared_length", ODD_NUMBERS),
    ("manifest", "model.flops_per_windowed_length derived.memory.device_bytes", ODD_NUMBERS),
    ("manifest", "derived.memory model.shape", (None, [], "x", 5, {"num_layers": -1}, DEEP)),
    ("manifest", "model.name", (LONG, "x" * (900 << 10), "\ud800", "\u202e")),
    ("manifest", "model.flops_convention", (LONG, 5, [])),
    ("manifest", "device.peak_flops_per_s", ODD_NUMBERS),
    ("manifest", "device device.name", (None, [], 5, "\0", DEEP)),
    ("manifest", "paced", (3, [], "x", {}, {"a": math.inf}, DEEP)),
    ("manifest", "started_ns clock_error_ns", ODD_TIMES),
    ("manifest", "job pod environment versions config", (5, [], DEEP)),
    ("manifest", "config.big", ({str(at): at for at in range(5_000)},)),
    ("manifest", "rank world_size epoch run_id", (-1, 2**40, "x", None)),
    ("header", "world_size", (0, 1, 3, 2**24, 2**24 + 1, MOST32, 2**32 - 1)),
    ("header", "anchor_unix_ns", (0, LEAST64, 2**62, MOST64)),
    ("header", "host", ("", "\u202e", "x" * 60)),
    ("exit", "state", ("", "nope", 5, None, [])),
    ("exit", "at_ns", ODD_TIMES),
    ("exit", "exception", ODD_EXCEPTIONS),
    ("groups", "members", MEMBERS),
    ("groups", "group_id", ("", "zz", "0", "f" * 16, "f" * 17, 7)),
    ("groups", "kind name", (*FEW_NAMES, "nope", 5)),
    ("events", "at_ns", ODD_TIMES),
    ("events", "data", (None, [], "x", 5, DEEP)),
    ("spans", "step", (-1, MOST32)),
    ("spans", "microbatch chunk", (-5, MOST32)),
    ("spans", "seq group_id", (0, MOST64)),
    ("spans", "src_rank dst_rank num_bytes", (-5, MOST32)),
    ("steps", "loss", (math.nan, math.inf, 1e308)),
    ("steps", "num_tokens", (0, LEAST64, MOST64)),
    ("microbatches", "sum_squared_lengths num_tokens", (0, LEAST64, MOST64)),
)
ONE_SPOOL: Values = (
    ("manifest", "coords", (None, [], {}, "x", DEEP)),
    ("header", "rank", (4, 2**24, MOST32, 2**32 - 1)),
    ("header", "epoch", (1, MOST32, 2**32 - 1)),
    ("spans", "step", (-1, MOST32)),
    ("spans", "start_ns", (0, 2**62)),
    ("steps", "step", (-1, MOST32)),
)


def _edges(way: Way, values: Values, *, is_everywhere: bool = True) -> tuple[Edge, ...]:
    return tuple(
        Edge(
            way=way,
            part=part,
            path=tuple(column.split(".")),
            value=value,
            is_everywhere=is_everywhere,
        )
        for part, columns, each in values
        for column in columns.split()
        for value in each
    )


def _of_events() -> Iterator[Edge]:
    odd = [(kind, data) for kind in EVENT_KINDS for data in EVENT_DATA]
    for kind, data in (*odd, *EVENTS):
        event = {"kind": kind, "data": data}
        yield Edge(way=Way.ROWS, part="events", path=("*",), value=event)
        if kind.startswith("alert"):
            yield Edge(way=Way.ROWS, part="events", path=("*",), value={**event, **FORGED})
    for kind, data in EVENTS:
        if data.startswith("{") and "1e400" not in data:
            document = {"kind": kind, "data": json.loads(data)}
            yield Edge(way=Way.SPOOL, part="events", path=("*",), value=document)


EDGES = (
    *_edges(Way.ROWS, ROWS),
    *_edges(Way.ROWS, ONE_ROW, is_everywhere=False),
    *_of_events(),
    *_edges(Way.WIRE, (*WIRE, *WIRE_OR_ONE_ROW)),
    *_edges(Way.WIRE, WIRE_OR_ONE_ROW, is_everywhere=False),
    *_edges(Way.SPOOL, SPOOLS),
    *_edges(Way.SPOOL, ONE_SPOOL, is_everywhere=False),
)

LETHAL = frozenset(
    {
        "rows runs.layout.pp = -5",
        "rows runs.layout = {'': 2}",
        "rows runs.world_size = 0",
        "rows runs.model = 'null'",
        "rows ranks.rank of one = -5",
        "rows groups.members = [-1, -2]",
        "spool manifest.layout.dp = 200000000",
        "wire key.rank = 2147483647",
    }
)
"""Values that once ended the server, or the analysis of every run."""


def _quick() -> Iterator[Edge]:
    """Yield what once ended the server, and a choice of all others."""
    yield from (edge for edge in EDGES if edge.name in LETHAL)
    others = [edge for edge in EDGES if edge.name not in LETHAL]
    yield from random.Random(34).sample(others, 23)


QUICK = tuple(_quick())
"""The values that `make test` sends; `make edges` sends all."""

QUICK_STORED = tuple(
    edge
    for edge in EDGES
    if edge.way is not Way.SPOOL
    and (
        edge.name in LETHAL
        or (isinstance(edge.value, dict) and edge.value.items() >= FORGED.items())
    )
)
"""Those that `make test` stores without any check, as an older version may have done."""

"""Limits of the gateway, and the settings that a request may choose."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from .errors import BAD_ARGUMENTS, QueryError, refused

if TYPE_CHECKING:
    from collections.abc import Mapping

GIB = 1 << 30

CGROUP_LIMITS = {
    "": (Path("/sys/fs/cgroup"), "memory.max"),
    "memory": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
}
"""Root and limit file by controller: version 2 of cgroups names none.

Source: cgroups(7); the kernel's cgroup-v1/memory and cgroup-v2."""

SEVERAL_BYTES = 16 * GIB
"""Memory from which on statements run beside each other."""


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def machine_bytes() -> int:
    """Return the memory of the machine, or the limit of this process's cgroups if it is lower."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in CGROUP_LIMITS:
                continue
            root, name = CGROUP_LIMITS[controllers]
            for folder in (Path(path), *Path(path).parents):
                with suppress(OSError, ValueError):  # no such file, or the text "max"
                    limit = (root / folder.relative_to("/") / name).read_text(encoding="ascii")
                    found = min(found, int(limit))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLimits:
    """Limits of one statement, and of all together."""

    max_seconds: int = 120
    max_rows: int = 50_000_000
    max_result_bytes: int = GIB
    max_memory_bytes: int = 5 * GIB // 2
    """Memory of one statement, including its result. `max_running` of them leave the engine
    (`collector.store.store.ENGINE_OPTIONS`) enough memory for ingest."""

    max_running: int = 2
    max_waiting: int = 32
    """Queued statements. Beyond these, a statement is refused at once, to be tried again."""

    max_held_bytes: int = 2 * GIB
    """Size of results that clients have not fetched yet. Beyond it, statements are refused."""

    max_resident_bytes: int = 7 * GIB
    """Resident memory of the whole server: the engine's limit, and the rest. Beyond it, running
    statements are ended."""

    @classmethod
    def fitting(cls, memory_bytes: int) -> Self:
        """Return the limits of a server that has this much memory, at most the defaults.

        All running statements together have a quarter, results that are held an eighth. The rest
        is for ingest, pages, analyses, compressed copies of results, and what a statement takes
        beyond its limit.
        """
        most = cls()
        num_running = most.max_running if memory_bytes >= SEVERAL_BYTES else 1
        return cls(
            max_memory_bytes=min(most.max_memory_bytes, memory_bytes // 4 // num_running),
            max_running=num_running,
            max_held_bytes=min(most.max_held_bytes, memory_bytes // 8),
            max_resident_bytes=min(most.max_resident_bytes, memory_bytes // 8 * 7),
        )

    def settings(self) -> dict[str, int | str]:
        """Return the engine's settings of each statement."""
        return {
            **OUTPUT,
            "max_threads": 2,
            "max_execution_time": self.max_seconds,
            "timeout_overflow_mode": "throw",
            "max_result_rows": self.max_rows,
            "max_result_bytes": self.max_result_bytes,
            "result_overflow_mode": "throw",
            "max_memory_usage": self.max_memory_bytes,
            "max_query_size": MAX_STATEMENT_BYTES,
            "max_ast_elements": 20_000,
            "max_expanded_ast_elements": 1_000,
            "allow_introspection_functions": 0,
            "aggregate_function_input_format": VALUES,
            "max_bytes_before_external_group_by": 0,
            "max_bytes_before_external_sort": 0,
            # A cut whose acknowledgement was lost may be stored twice, and must not count twice.
            "final": 1,
        }


MAX_STATEMENT_BYTES = 1 << 18

VALUES = "value"
"""Meaning of a text that is cast to an aggregate's state: a value. The engine's default is the
bytes of the state itself, with which a statement could give the engine arbitrary memory."""

OUTPUT: dict[str, int | str] = {
    "output_format_arrow_low_cardinality_as_dictionary": 1,
    "output_format_arrow_string_as_string": 1,
    "output_format_arrow_compression_method": "none",
    "output_format_json_quote_64bit_integers": 0,
}
"""Equal to `collector.store.store.SETTINGS`: the gateway's bytes are those that the store reads."""

REQUEST_LIMITS = {
    "max_execution_time": "max_seconds",
    "max_result_rows": "max_rows",
    "max_result_bytes": "max_result_bytes",
    "max_memory_usage": "max_memory_bytes",
}
"""Settings that a request may lower, with the field of `QueryLimits` that bounds each."""

NUMBERS = {
    "limit": 1 << 62,
    "offset": 1 << 62,
    "max_rows_to_read": 1 << 62,
    "max_bytes_to_read": 1 << 62,
    "max_block_size": 1 << 18,
    "max_threads": 2,
    "output_format_json_quote_64bit_integers": 1,
    "output_format_json_quote_denormals": 1,
    "output_format_arrow_string_as_string": 1,
    "output_format_arrow_low_cardinality_as_dictionary": 1,
    "extremes": 1,
    "final": 1,
    "join_use_nulls": 1,
    "cast_string_to_dynamic_use_inference": 1,
}
"""Settings that a request may choose, from 0 (or `MIN_VALUES`) to this value."""

MIN_VALUES = {"max_threads": 1}
"""Smallest values. 0 threads would mean one for each core."""

CHOICES = {
    "result_overflow_mode": frozenset({"throw", "break"}),
    "output_format_arrow_compression_method": frozenset({"none", "lz4_frame", "zstd"}),
    "date_time_input_format": frozenset({"basic", "best_effort", "best_effort_us"}),
    "date_time_output_format": frozenset({"simple", "iso", "unix_timestamp"}),
}

IGNORED = frozenset(
    {
        "buffer_size", "client_protocol_version", "close_session", "compress", "decompress",
        "enable_http_compression", "http_headers_progress_interval_ms",
        "http_zlib_compression_level", "log_comment", "log_queries", "quota_key", "readonly",
        "send_progress_in_http_headers", "session_check", "session_id", "session_timeout",
        "stacktrace", "wait_end_of_query",
    }
)  # fmt: skip
"""Settings that concern the transport, or have no effect here: statements are read-only, are
answered when complete, and have no session."""


def choose_settings(asked: Mapping[str, str], limits: QueryLimits) -> dict[str, int | str]:
    """Return the engine's settings for a request.

    Args:
        asked: Settings of the URL by name.
        limits: Limits that no request exceeds.

    Raises:
        QueryError: A setting cannot be changed, or its value is invalid.
    """
    chosen = limits.settings()
    for name, text in asked.items():
        if name in IGNORED:
            continue
        if name in REQUEST_LIMITS:
            cap: int = getattr(limits, REQUEST_LIMITS[name])
            chosen[name] = min(_number(name, text) or cap, cap)
        elif name in NUMBERS:
            value = _number(name, text)
            least, most = MIN_VALUES.get(name, 0), NUMBERS[name]
            if not least <= value <= most:
                raise QueryError(BAD_ARGUMENTS, f"setting {name} must be {least} to {most} here")
            chosen[name] = value
        elif name in CHOICES:
            if text not in CHOICES[name]:
                raise QueryError(BAD_ARGUMENTS, f"setting {name} cannot be {text[:40]!r} here")
            chosen[name] = text
        else:
            raise refused(f"setting {name[:80]} cannot be changed")
    return chosen


def _number(name: str, text: str) -> int:
    value = text.strip().partition(".")[0] if name == "max_execution_time" else text.strip()
    if text in {"true", "false"}:
        return int(text == "true")
    if not (value.isascii() and value.isdigit() and len(value) < 19):  # noqa: PLR2004  # 2^62
        raise QueryError(BAD_ARGUMENTS, f"setting {name} must be a number, not {text[:40]!r}")
    return int(value)

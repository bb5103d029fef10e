"""Builder of the dump of a flight recorder, as PyTorch's ProcessGroupNCCL writes it."""

from __future__ import annotations

import json
import pickle  # noqa: TID251  # written, never loaded
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

BASE_NS = 1_700_000_000_000_000_000
SECOND = 1_000_000_000
WHOLE_JOB = "default_pg"


class DumpBuilder:
    """Calls of one rank, one a second."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        groups: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
    ) -> None:
        self.rank = rank
        self.groups = dict(groups or {"0": (WHOLE_JOB, tuple(range(world_size)))})
        self.entries: list[dict[str, Any]] = []
        self.status = {"0": {"last_completed_collective": -1}}
        self.first_record = 1_000
        """A ring that has overwritten its first records; 0: one that has all."""

        self.has_begins = False
        """Whether it times the device (``TORCH_NCCL_ENABLE_TIMING``)."""

    def call(
        self,
        name: str,
        seq: int,
        *,
        group: str = "0",
        state: str = "scheduled",
        shape: tuple[int, ...] = (64,),
        dtype: str = "Float",
        **more: Any,  # noqa: ANN401
    ) -> None:
        """Add a call, such as ``all_reduce`` or ``send 0->1`` (positions in the group)."""
        is_p2p = name.startswith(("send", "recv"))
        number = len(self.entries)
        at_ns = BASE_NS + number * SECOND
        has_begun = state == "started" or (state == "completed" and self.has_begins)
        self.entries.append(
            {
                "record_id": self.first_record + number,
                "pg_id": list(self.groups).index(group),
                "process_group": (group, self.groups[group][0]),
                "collective_seq_id": 0 if is_p2p else seq,
                "p2p_seq_id": seq if is_p2p else 0,
                "op_id": seq,
                "profiling_name": f"nccl:{name}",
                "time_created_ns": at_ns,
                "input_sizes": [list(shape)],
                "input_dtypes": [dtype],
                "output_sizes": [list(shape)],
                "output_dtypes": [dtype],
                "state": state,
                "time_discovered_started_ns": at_ns if has_begun else None,
                "time_discovered_completed_ns": at_ns if state == "completed" else None,
                "retired": state == "completed",
                "timeout_ms": 600_000,
                "is_p2p": is_p2p,
                **more,
            }
        )

    def document(self) -> dict[str, Any]:
        """Return the content of the dump."""
        return {
            "version": "2.10",
            "comm_lib_version": "2.27.3",
            "pg_config": {
                name: {"name": name, "desc": description, "ranks": str(list(members))}
                for name, (description, members) in self.groups.items()
                if self.rank in members
            },
            "pg_status": self.status,
            "entries": self.entries,
        }

    def old_document(self, version: str) -> dict[str, Any]:
        """Return the content as torch 2.2 (1.0) or 2.3 (1.4) wrote it."""
        keys = ["pg_id", "profiling_name", "time_created_ns", "input_sizes", "output_sizes"]
        keys += ["state", "retired"]
        keys += ["record_id", "op_id"] if version == "1.4" else []
        entries = [
            {key: entry[key] for key in keys} | {"seq_id": entry["op_id"], "frames": []}
            for entry in self.entries
        ]
        document: dict[str, Any] = {"version": version, "entries": entries}
        if version == "1.4":
            document["pg_config"] = {
                number: list(members) for number, (_, members) in enumerate(self.groups.values())
            }
        return document

    def write_old(self, folder: Path, version: str) -> Path:
        """Write the pickle of an older torch; numbers of its groups are those of this rank."""
        path = folder / f"nccl_trace_rank_{self.rank}"
        path.write_bytes(pickle.dumps(self.old_document(version), protocol=2))
        return path

    def write(self, folder: Path, *, prefix: str = "nccl_trace_rank_") -> Path:
        """Write the pickle of the rank."""
        path = folder / f"{prefix}{self.rank}"
        path.write_bytes(pickle.dumps(self.document(), protocol=2))
        return path

    def write_json(self, folder: Path) -> Path:
        """Write the JSON of the rank, in which numbers of groups are texts and unknown times 0."""
        document = self.document()
        document["pg_status"] = {
            name: {key: str(value) for key, value in status.items()}
            for name, status in document["pg_status"].items()
        }
        for entry in document["entries"]:
            for key, value in entry.items():
                entry[key] = 0 if value is None else value
        if not document["entries"]:
            del document["entries"]
        path = folder / f"nccl_trace_rank_{self.rank}.json"
        path.write_text(json.dumps(document))
        return path

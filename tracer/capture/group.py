"""Process groups: their id, kind, members, and the sequence numbers of their operations."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..span import SpanKind, hash_group
from ..topology import GROUP_KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..record.recorder import Recorder
    from ..topology import Layout

MESH_PREFIX = "mesh_"
"""Prefix in `torch.distributed.device_mesh` of the description of an axis's group: ``mesh_tp``."""

DEFAULT_MESH = "default"
"""Axis name of a mesh that spans all ranks on a backend of its own."""

DESCRIBED = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_DATA_PARALLEL_GROUP": "edp",
    "INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "edp",
    "INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "edp",
}
"""Axis of each group of Megatron-LM, by its description in `parallel_state.py`."""

AXES = ("pp", "dp", "tp", "cp")
"""Axes whose sizes multiply to the world size; ep overlays dp."""

EXCHANGE = "all_to_all"
"""Begin of the names of operations that only the experts' axis has, not the data axis below it."""

P2P_KINDS = (SpanKind.PP_SEND, SpanKind.PP_RECV)
"""Kinds of a send and a receive in a group that belongs to no axis: those of the pipeline."""


class CommGroup:
    """One communication group as seen by this rank."""

    __slots__ = (
        "group_id",
        "kind",
        "members",
        "name",
        "next_seq",
        "pair_seqs",
        "rank",
        "recv_kind",
        "send_kind",
        "size",
        "track_id",
    )

    def __init__(
        self,
        *,
        group_id: int,
        axis: str,
        name: str,
        members: Sequence[int],
        rank: int,
        track_id: int,
    ) -> None:
        self.group_id = group_id
        self.name = name
        """As in the job."""

        self.set_axis(axis)
        self.members = tuple(members)
        self.size = len(self.members)
        self.rank = rank
        """Global rank of this process."""

        self.track_id = track_id
        # A count returns the next number in one C call, because threads may launch at the same
        # time.
        self.next_seq: Callable[[], int] = itertools.count().__next__
        self.pair_seqs: defaultdict[tuple[int, int], Callable[[], int]] = defaultdict(
            lambda: itertools.count().__next__
        )

    def set_axis(self, axis: str) -> None:
        """Give the communications that begin from now on the kinds of an axis."""
        kind = SpanKind(GROUP_KINDS.get(axis, SpanKind.OTHER))
        # The p2p of a context-parallel ring belongs to its own axis, not to the pipeline.
        self.send_kind, self.recv_kind = P2P_KINDS if kind is SpanKind.OTHER else (kind, kind)
        self.kind = kind


class Groups:
    """All groups in which this process has communicated."""

    def __init__(self, recorder: Recorder, layout: Layout | None) -> None:
        self._recorder = recorder
        self._world_axis = sole_axis(layout)
        self._is_of_experts = layout is not None and 1 < layout.ep == layout.world_size
        self._seen: dict[int, tuple[weakref.ref[Any], CommGroup | None]] = {}
        """By `id` of torch's object, as long as that is alive."""

        self._groups: dict[tuple[int, int], CommGroup] = {}
        """By id and own rank. A group that is made again continues its sequence numbers."""

        self._unknown: set[str] = set()
        self.descriptions: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        """Descriptions of groups written in Python, whose objects do not have one."""

    def find(self, process_group: Any) -> CommGroup | None:  # noqa: ANN401 - a pybind class
        """Return the group of torch's object; write it to `groups.jsonl` when it is first seen.

        Returns:
            None for a group whose members torch does not know, because the job made it without
            `torch.distributed.new_group`.
        """
        # Not by name: after `destroy_process_group` torch reuses names for other members. By a weak
        # reference: a strong one would keep the group's threads alive.
        met = self._seen.get(id(process_group))
        if met is None or met[0]() is not process_group:
            key = id(process_group)
            # A callback in C only: an exception of a signal handler inside a Python callback would
            # be lost.
            forget = functools.partial(self._seen.pop, key)
            met = (weakref.ref(process_group, forget), self._read_group(process_group))
            self._seen[key] = met
        return met[1]

    def _read_group(self, process_group: Any) -> CommGroup | None:  # noqa: ANN401
        group_name = _group_name(process_group)
        try:
            # Positions in the group are in the group's own order, not in rank order.
            members = dist.get_process_group_ranks(process_group)
        except (KeyError, ValueError) as problem:
            if group_name not in self._unknown:
                self._unknown.add(group_name)
                self._recorder.event(
                    "tracer",
                    f"not capturing group {group_name!r}: torch does not know its members",
                    {"error": repr(problem)[:500]},
                )
            return None
        key = group_id, rank = hash_group(group_name, members), members[process_group.rank()]
        if key in self._groups:
            return self._groups[key]
        axis = self._axis(process_group)
        group = CommGroup(
            group_id=group_id,
            axis=axis,
            name=group_name,
            members=members,
            rank=rank,
            track_id=self._recorder.name_id(f"comm {axis or group_name}"),
        )
        self._write(group, axis)
        return self._groups.setdefault(key, group)

    def set_axis(self, group: CommGroup, axis: str) -> None:
        """Note that ``group`` spans an axis, which was not known when it was first seen."""
        group.set_axis(axis)
        self._write(group, axis)

    def _write(self, group: CommGroup, axis: str) -> None:
        self._recorder.add_group(
            group.group_id,
            kind=group.kind,
            name=f"{axis or 'group'}:{group.name}",
            members=sorted(group.members),
        )

    def kind_of(self, operation_name: str, group: CommGroup) -> SpanKind:
        """Return the kind of a collective: that of its group, or ``ep-comm`` if both share it."""
        is_of_experts = self._is_of_experts and group.kind is SpanKind.DP_COMM
        is_exchange = is_of_experts and operation_name.startswith(EXCHANGE)
        return SpanKind.EP_COMM if is_exchange else group.kind

    def __iter__(self) -> Iterator[CommGroup]:
        return iter(list(self._groups.values()))

    def read_axis(self, process_group: Any) -> str:  # noqa: ANN401
        """Return the axis for which a group was made, "" if its description does not name one."""
        descriptions = self.descriptions.get(process_group)
        if descriptions is None:
            descriptions = str(process_group.group_desc)
        axis = descriptions.removeprefix(MESH_PREFIX)
        if axis not in (descriptions, DEFAULT_MESH):
            return axis
        return DESCRIBED.get(descriptions, "")

    def _axis(self, process_group: Any) -> str:  # noqa: ANN401
        named = self.read_axis(process_group)
        if named:
            return named
        if process_group.size() == dist.get_world_size():
            return self._world_axis or "world"
        return ""


def _group_name(process_group: Any) -> str:  # noqa: ANN401 - a pybind class
    # Torch's own table first: the object of a group written in Python has no name.
    noted = dist.distributed_c10d._world.pg_names.get(process_group)
    return noted or str(process_group.group_name)


def sole_axis(layout: Layout | None) -> str:
    """Return the only axis of size above one, "" if there is none or several.

    A mesh axis that spans all ranks has no group of its own: torch reuses the default group, and
    the axis's name is lost. If the job has one axis only, the default group belongs to it.
    """
    if layout is None:
        return ""
    sizes = layout.to_dict()
    long = [axis for axis in AXES if sizes[axis] > 1]
    return long[0] if len(long) == 1 and sizes[long[0]] == layout.world_size else ""

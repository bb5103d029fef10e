"""Derivation of the parallel layout and this rank's coordinates from its process groups.

Used if the job declared neither. It runs once, when the first whole step is over: by then the job
has made the groups that it uses. From then on their communications have the kind of their axis.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..job.manifest import add_derived
from ..topology import AXES, AxisGroup, derive_layout
from .guard import Guard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..record.recorder import Recorder
    from ..topology import DerivedLayout
    from .communication import Communication

WRAPPED = "ddp"
"""Axis along which a wrapper of the model keeps its parameters equal."""

WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
)
"""Modules around a model that have a group."""

MESHED = (("torch.distributed.fsdp", "FSDPModule"),)
"""Modules that have one or more meshes instead."""


class LayoutDerivation:
    """Collects models and stages until the first whole step is over, then derives the layout."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._guard = Guard(recorder, "placement")
        self._models: dict[int, weakref.ref[Any]] = {}
        self._stages: dict[int, weakref.ref[Any]] = {}
        self._num_steps = 0
        self._found: DerivedLayout | None = None

    def start(self, communication: Communication) -> None:
        """Derive when a step is over, also from the communications in it."""
        self._recorder.on_step_begin(lambda: self._step_begins(communication))
        self._recorder.on_tick(self._write)

    def forward_begins(self, model: Any) -> None:  # noqa: ANN401 - a Module
        """Note a trained model, and its wrapper if the job made that after passing the model."""
        self._guard.call(self._note_models, model)

    def on_stage(self, stage: Any) -> None:  # noqa: ANN401 - a private class of torch
        """Note a pipeline stage of this rank."""
        if id(stage) not in self._stages:
            self._guard.call(self._note_stage, stage)

    def _note_models(self, model: Any) -> None:  # noqa: ANN401
        wrapper = getattr(sys.modules.get("torch.nn.parallel"), "DistributedDataParallel", None)
        for module in (model, getattr(wrapper, "_active_ddp_module", None)):
            if module is not None:
                self._models[id(module)] = weakref.ref(module)

    def _note_stage(self, stage: Any) -> None:  # noqa: ANN401
        self._stages[id(stage)] = weakref.ref(stage)

    def _step_begins(self, communication: Communication) -> bool:
        """Return True if there is nothing left to wait for."""
        self._num_steps += 1
        # A model that is found by the optimizer of the first step runs from the second on.
        has_run = self._models or self._stages
        if self._num_steps == 1 or (self._num_steps == 2 and not has_run):  # noqa: PLR2004
            return False
        self._found = self._derive(communication)
        return True

    def _write(self) -> None:
        derived, self._found = self._found, None
        if derived is not None:
            declared = {"layout": derived.layout.to_dict(), "coords": derived.coords.to_dict()}
            add_derived(self._recorder.folder, declared)

    def _derive(self, communication: Communication) -> DerivedLayout | None:
        identity = self._recorder.identity
        if identity.world_size == 1 or not dist.is_initialized():
            return None
        if (dist.get_rank(), dist.get_world_size()) != (identity.rank, identity.world_size):
            return None
        stages = _alive(self._stages)
        models = [*_alive(self._models), *(stage.submod for stage in stages)]
        num_chunks = {stage.num_stages // stage.group_size for stage in stages}
        named = [*_read_named_groups(communication), *_read_parameter_meshes(models)]
        wrapped = [*_read_wrappers(models)]
        derived = derive_layout(
            [*named, *_read_stages(stages), *wrapped],
            rank=identity.rank,
            world_size=identity.world_size,
            num_chunks=max(num_chunks, default=1),
        )
        if derived is None or len(num_chunks) != (derived.layout.pp > 1):
            return None
        declared = {frozenset(axis_group.members) for axis_group in named}
        groups = derived.groups
        is_named = groups.keys() <= declared and all(len(it) < identity.world_size for it in groups)
        parts = set(_read_hsdp_groups(models)) if wrapped else set()
        if not is_named and not _explains(derived, declared | parts, communication):
            return None
        communication.set_axes(dict.fromkeys(parts, "dp") | groups)
        return derived


def _explains(
    found: DerivedLayout, known: set[frozenset[int]], communication: Communication
) -> bool:
    """Return whether a layout without named axes explains the communications.

    Experts or sequences that are distributed over all ranks show themselves by an all-to-all (the
    backward of torch's ring attention has one), by p2p outside the pipeline, or by a group that is
    neither all ranks nor an axis.

    Args:
        known: Members of the groups whose use is known; those inside one axis are a part of it.
        communication: All communications so far.
    """
    if any(name.startswith("all_to_all") for name in communication.operation_names()):
        return False
    for group in communication.groups:
        members = frozenset(group.members)
        is_axis = members in found.groups
        is_part = members in known and any(members < axis for axis in found.groups)
        if not is_axis and not is_part and 1 < group.size < found.layout.world_size:
            return False
        if group.pair_seqs and members != found.pipeline:
            return False
    return True


def _read_named_groups(communication: Communication) -> Iterator[AxisGroup]:
    for group in list(dist.distributed_c10d._world.pg_map):
        axis = communication.groups.read_axis(group)
        if axis in AXES:
            yield AxisGroup(axis=axis, members=tuple(dist.get_process_group_ranks(group)))


def _read_parameter_meshes(models: Iterable[Any]) -> Iterator[AxisGroup]:
    """Yield the named axes of distributed parameters: an axis of all ranks has no own group."""
    meshes = [getattr(it, "device_mesh", None) for model in models for it in model.parameters()]
    for mesh in {id(mesh): mesh for mesh in meshes if mesh is not None}.values():
        for axis in mesh.mesh_dim_names or ():
            if axis in AXES:
                members = dist.get_process_group_ranks(mesh.get_group(axis))
                yield AxisGroup(axis=axis, members=tuple(members))


def _read_stages(stages: Iterable[Any]) -> Iterator[AxisGroup]:
    for stage in stages:
        group = stage.group or dist.group.WORLD
        yield AxisGroup(axis="pp", members=tuple(dist.get_process_group_ranks(group)))


def _read_wrappers(models: Iterable[Any]) -> Iterator[AxisGroup]:
    """Yield the one group in which all trained parameters are kept equal, if there is one."""
    models = list(models)
    wrapped: dict[tuple[int, ...], set[int]] = {}
    for module in _find_modules(models, WRAPPERS):
        members = tuple(dist.get_process_group_ranks(module.process_group))
        wrapped.setdefault(members, set()).update(map(id, module.parameters()))
    for module in _find_modules(models, MESHED):
        for mesh in _read_meshes(module):
            members = tuple(mesh.mesh.flatten().tolist())
            wrapped.setdefault(members, set()).update(map(id, module.parameters()))
    if len(wrapped) == 1:
        ((members, parameters),) = wrapped.items()
        trained = {id(it) for model in models for it in model.parameters() if it.requires_grad}
        if trained <= parameters:
            yield AxisGroup(axis=WRAPPED, members=members)


def _read_hsdp_groups(models: Iterable[Any]) -> Iterator[frozenset[int]]:
    """Yield the members of the groups into which HSDP divides a model's data axis."""
    for mesh in (mesh for module in _find_modules(models, MESHED) for mesh in _read_meshes(module)):
        for dimension in range(mesh.ndim):
            yield frozenset(dist.get_process_group_ranks(mesh.get_group(dimension)))


def _read_meshes(module: Any) -> Iterator[Any]:  # noqa: ANN401 - a Module
    """Yield the meshes over which FSDP2 shards and replicates the parameters of a module."""
    state = module._get_fsdp_state()
    one = getattr(state, "_fsdp_param_group", None)
    for group in getattr(state, "_fsdp_param_groups", [one] if one is not None else []):
        # If set, the mesh has axes along which parameters differ.
        if getattr(group.mesh_info, "dp_mesh_dims", None) is None:
            yield group.mesh_info.mesh


def _find_modules(models: Iterable[Any], names: Iterable[tuple[str, str]]) -> Iterator[Any]:
    """Return the modules that are of one of torch's classes, if that class is imported."""
    classes = [getattr(sys.modules.get(package), name, None) for package, name in names]
    kinds = tuple(kind for kind in classes if kind is not None)
    modules = [module for model in models for module in model.modules()]
    wanted = {kind for kind in set(map(type, modules)) if issubclass(kind, kinds)}
    return (module for module in modules if type(module) in wanted)


def _alive(references: dict[int, weakref.ref[Any]]) -> list[Any]:
    return [it for reference in references.values() if (it := reference()) is not None]

"""What the tracer finds out about the job by itself: the inputs of MFU that it was not told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..job.flops import compute_dtype, model_flops
from ..job.manifest import add_derived, count_parameters, read_device
from .batch import shape_of
from .guard import Guard

if TYPE_CHECKING:
    from ..record.recorder import Recorder


class Derivation:
    """Reads model and device once, at the first forward, when both are as they will be."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.guard = Guard(recorder, "model description")
        """Active while a forward would still be noted."""

        self.is_whole = True
        """Whether what has a forward is all of the model on this rank, not one chunk of several."""

        self._waiting: tuple[Any, int | None, dict[str, object]] | None = None
        recorder.on_tick(self._write)

    def forward_begins(self, model: Any, batch: object) -> None:  # noqa: ANN401 - a Module
        """Note the first forward of ``model``; later ones do nothing."""
        self.guard.call(self._note, model, batch)

    def _note(self, model: Any, batch: object) -> None:  # noqa: ANN401
        # Only what belongs to this thread and this moment; the rest is read in the background.
        shape = shape_of(batch)
        here = {**read_device(), "dtype": compute_dtype(model)}
        self._waiting = (model, shape[-1] if shape else None, here)
        self.guard.active = False

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return
        model, seq_length, derived = waiting
        if self.is_whole:
            derived["num_parameters"] = count_parameters(model)
            flops = None if seq_length is None else model_flops(model, seq_length=seq_length)
            if flops is not None:
                derived["flops_per_token"] = flops.flops_per_token
                derived["flops_convention"] = flops.convention
        known = {key: value for key, value in derived.items() if value not in (None, "")}
        if known:
            add_derived(self._recorder.folder, known)

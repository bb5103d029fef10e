from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from rankscope.tracer.capture.grad_scaler import SkippedSteps
from rankscope.tracer.capture.optimizer import StepCounter
from rankscope.tracer.patches import Patches
from tests.support.tracer.recording import recorder_in

if TYPE_CHECKING:
    from pathlib import Path


def test_a_step_whose_optimizer_the_scaler_skips_is_a_step_and_an_event(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    steps, patches = StepCounter(recorder, from_start=True), Patches()
    removers = [SkippedSteps(recorder, steps).watch(patches), steps.count()]
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight])
    scaler = torch.amp.GradScaler("cpu")
    begun = []
    for factor in (1.0, float("inf"), float("nan"), 1.0):
        steps.on_next_work()
        begun.append(recorder.step_number)
        scaler.scale((weight * factor).sum()).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    for remove in removers:
        remove()
    patches.undo()
    recorder.shutdown()

    assert begun == [0, 1, 2, 3]
    events = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    skipped = [each["data"] for each in events if each["kind"] == "optimizer-skipped"]
    assert skipped == [{"step": 1, "num_skipped": 1}, {"step": 2, "num_skipped": 2}]

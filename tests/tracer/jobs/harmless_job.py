"""A short training through every capture, repeated with one part of the tracer broken each time.

Prints one JSON object: by part, the job's losses and the number of counted errors.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from rankscope import tracer
from rankscope.tracer.capture import data
from rankscope.tracer.capture import forward_backward as compute
from rankscope.tracer.capture.launch import DeviceLaunches
from rankscope.tracer.record.lane import Lane, Lanes
from rankscope.tracer.record.recorder import Recorder
from rankscope.tracer.record.sampling import SamplingControl
from rankscope.tracer.spool import DropReason
from tests.support.tracer.reading import dropped

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS: dict[str, tuple[Any, str]] = {
    "nothing": (tracer, "__name__"),
    "lane": (Recorder, "lane"),
    "head": (Recorder, "head"),
    "is recorded": (Recorder, "is_recorded"),
    "name": (Recorder, "name_id"),
    "index": (Recorder, "index"),
    "compute span": (compute, "ComputeSpan"),
    "write": (Lane, "write"),
    "append": (Lane, "append"),
    "place": (Lane, "set_place"),
    "lanes": (Lanes, "begin_step"),
    "sampling control": (SamplingControl, "begin_step"),
    "batch": (data, "count_batch"),
    "current lane": (Lanes, "current"),
    "on device": (DeviceLaunches, "enter"),
    "events": (Recorder, "append_line"),
}


def fails(*about: object, **named: object) -> None:
    raise RuntimeError("ours")


# The file name by which an error is recognized as the tracer's.
fails.__code__ = fails.__code__.replace(co_filename=tracer.__file__)


def job() -> list[float]:
    """Train two steps and return the losses."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    data: Any = torch.arange(16.0).reshape(4, 4)
    for number, batch in enumerate(DataLoader(data, batch_size=2)):
        with tracer.span("forward and loss", microbatch=number):
            loss = model(batch).square().mean()
        loss.backward()
        dist.all_reduce(model.weight.grad)
        dist.all_reduce(model.bias.grad, async_op=True).wait()
        optimizer.step()
        optimizer.zero_grad()
        tracer.event("note", "a step")
        tracer.step(tokens=2, loss=loss)
        gc.collect()
        torch.save(model.state_dict(), os.devnull)
        losses.append(loss.item())
    return losses


@contextmanager
def broken(owner: Any, name: str) -> Iterator[None]:  # noqa: ANN401
    before = getattr(owner, name)
    setattr(owner, name, fails if callable(before) else before)
    try:
        yield
    finally:
        setattr(owner, name, before)


def main() -> None:
    """Run the job once untraced, and once with each part broken."""
    dist.init_process_group(
        "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    results: dict[str, object] = {"untraced": [job(), 0]}
    for part, (owner, name) in PARTS.items():
        recorder = tracer.install(spool=Path(sys.argv[1]), run=f"run-{part.replace(' ', '-')}")
        assert isinstance(recorder, Recorder)
        tracer.begin_steps()
        with broken(owner, name):
            losses = job()
        tracer.shutdown()
        results[part] = [losses, dropped(recorder.folder).get(DropReason.INTERNAL_ERROR, 0)]
    dist.destroy_process_group()  # else torch itself aborts some exits
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()

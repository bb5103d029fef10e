"""A real torch job on the CPU, whose tensors a fake device claims: hooks, marks and records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from rankscope.tracer.capture.start import start_captures
from rankscope.tracer.span import SpanFlag
from tests.support.tracer.claiming import ClaimingCuda
from tests.support.tracer.reading import Row, dropped, read_spans
from tests.support.tracer.timing import TimedRecorder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.tracer.torch.fake_cuda import FakeCuda

ON_DEVICE = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN
MS = 1_000_000


@pytest.fixture
def cuda() -> ClaimingCuda:
    return ClaimingCuda()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    """Create a world of one, on gloo."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def traced(folder: Path, cuda: FakeCuda, model: torch.nn.Module | None) -> TimedRecorder:
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text("{}")
    timed = TimedRecorder(folder, cuda)
    start_captures(timed.recorder, model=model, layout=None)
    timed.recorder.device_timing = timed.timing
    timed.recorder.begin_steps()
    return timed


def losses(model: torch.nn.Module, timed: TimedRecorder | None) -> list[float]:
    """Train three steps."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters())
    kept = []
    for _ in range(3):
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(loss.item())
        if timed is not None:
            timed.recorder.step()
            timed.turns(3)
    return kept


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))


def read_rows_of(timed: TimedRecorder, folder: Path) -> list[Row]:
    timed.shutdown(turns=5)
    return read_spans(folder)


def test_compute_is_timed_on_the_device_and_losses_are_bit_identical(
    tmp_path: Path, cuda: ClaimingCuda
) -> None:
    plain = losses(small_model(), None)
    model = small_model()
    timed = traced(tmp_path / "spool", cuda, model)
    assert losses(model, timed) == plain

    rows = [row for row in read_rows_of(timed, tmp_path / "spool") if row.track != "main"]
    assert [(row.step, row.name) for row in rows] == [
        (step, name) for step in range(3) for name in ("forward", "backward", "optimizer")
    ]
    assert {row.flags for row in rows} == {ON_DEVICE}
    assert {row.microbatch for row in rows if row.name == "forward"} == {0}
    assert dropped(tmp_path / "spool") == {}


def test_inference_mode_is_timed_and_changes_nothing(tmp_path: Path, cuda: ClaimingCuda) -> None:
    model = small_model()
    data = torch.ones(2, 8)
    with torch.inference_mode():
        plain = model(data)
    timed = traced(tmp_path / "spool", cuda, model)
    with torch.inference_mode():
        assert torch.equal(model(data), plain)

    (row,) = read_rows_of(timed, tmp_path / "spool")
    assert (row.name, row.flags, row.microbatch) == ("forward", ON_DEVICE, -1)


class OwnModel(torch.nn.Module):
    """A model with a forward of its own: torch compiles its modules only as parts of another."""

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def compiled() -> torch.nn.Module:
    """Return the small model, compiled with ``fullgraph``: a graph break would raise."""
    model = torch.compile(small_model(), backend="eager", fullgraph=True)
    assert isinstance(model, torch.nn.Module)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_compiled_model_gets_no_further_graph_break_and_is_timed(
    tmp_path: Path, cuda: ClaimingCuda, *, in_parts: bool
) -> None:
    plain = losses(OwnModel(small_model()) if in_parts else compiled(), None)
    model = OwnModel(small_model()) if in_parts else compiled()
    timed = traced(tmp_path / "spool", cuda, model)
    if in_parts:
        model.compile(backend="eager", fullgraph=True)
    assert losses(model, timed) == (pytest.approx(plain) if in_parts else plain)

    rows = read_rows_of(timed, tmp_path / "spool")
    assert [row.name for row in rows if row.flags == ON_DEVICE].count("forward") == 3


@pytest.mark.usefixtures("world")
def test_communication_is_marked_and_has_no_callback(tmp_path: Path, cuda: ClaimingCuda) -> None:
    timed = traced(tmp_path / "spool", cuda, None)
    timed.turns()
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    dist.all_reduce(tensor)
    summed = functional.all_reduce(tensor, "sum", dist.group.WORLD)  # type: ignore[arg-type]
    functional.wait_tensor(summed)  # type: ignore[no-untyped-call]
    never = dist.all_reduce(tensor, async_op=True)
    rows = read_rows_of(timed, tmp_path / "spool")

    assert never is not None
    sent = sorted((row for row in rows if row.kind != "wait"), key=lambda row: row.seq)
    assert [row.seq for row in sent] == [0, 1, 2, 3]
    assert {row.name for row in sent} == {"all_reduce"}
    assert not any(SpanFlag.HOST_CLOCK in row.flags for row in sent[:3])
    # The last one has no wait: only the host's clock is known.
    assert SpanFlag.HOST_CLOCK | SpanFlag.OPEN in sent[3].flags
    waits = [row for row in rows if row.kind == "wait"]
    assert [row.seq for row in waits] == [0, 1, 2]
    assert {(row.track, row.flags) for row in waits} == {("cuda:0 stream 0", ON_DEVICE)}
    assert dropped(tmp_path / "spool") == {}


def test_a_group_that_is_made_again_has_its_own_stream(tmp_path: Path, cuda: ClaimingCuda) -> None:
    timed = traced(tmp_path / "spool", cuda, None)
    timed.turns()
    for number in range(2):
        store = f"file://{tmp_path}/store{number}"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        for _ in range(2):
            work = dist.all_reduce(torch.ones(4), async_op=True)
            assert work is not None
            work.wait()
            timed.turns(3)
        dist.destroy_process_group()

    sent = [
        row
        for row in read_rows_of(timed, tmp_path / "spool")
        if row.group_id and row.kind != "wait"
    ]
    assert [row.seq for row in sent] == [0, 1, 2, 3]
    assert len({row.group_id for row in sent}) == 1
    # The work of a new communicator's stream before its first launch is unknown.
    known = [bool(row.flags & SpanFlag.DEVICE_BEGIN_KNOWN) for row in sent]
    assert known == [False, True, False, True]

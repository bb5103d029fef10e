"""A training loop without calls of the tracer, captured automatically: real torch, one process."""

from __future__ import annotations

import inspect
import io
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.utils.data import DataLoader

from rankscope import tracer
from rankscope.tracer.span import NONE, SpanFlag
from rankscope.tracer.spool import MICROBATCH, RecordType
from tests.support.tracer.reading import dropped, only_folder
from tests.support.tracer.torch_here import TORCH
from tests.tracer.integrations.recorded import Recorded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)

    def forward(self, input_ids: torch.Tensor, **_: object) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embedding(input_ids))
        return out


def sequences(*lengths: int) -> list[dict[str, torch.Tensor]]:
    """Return one sample per length, padded to 8."""
    return [
        {
            "input_ids": torch.ones(8, dtype=torch.int64),
            "attention_mask": (torch.arange(8) < length).long(),
        }
        for length in lengths
    ]


def train_model(model: nn.Module, loader: DataLoader[object], *, accumulate: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    for index, batch in enumerate(loader):
        model(**batch).sum().backward()
        if index % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture(autouse=True)
def _installed_for_a_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANKSCOPE_TRACE", "RANKSCOPE_RUN", "RANKSCOPE_DISABLE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    tracer.shutdown()


def compilations(recorded: Recorded) -> list[str]:
    return [row.name for row in recorded.rows if row.name.endswith("compile")]


def test_steps_and_tokens_are_counted_if_the_job_reports_none(tmp_path: Path) -> None:
    tracer.install(spool=tmp_path, run="plain", count_steps=True)
    model = Model()
    train_model(model, DataLoader(sequences(1, 2, 3, 4, 5, 6, 7, 8), batch_size=2), accumulate=2)  # type: ignore[arg-type]

    recorded = Recorded(tmp_path)
    assert recorded.tokens() == [(0, 10), (1, 26)]
    assert recorded.microbatches() == [(0, 0, 3, 5), (0, 1, 7, 25), (1, 0, 11, 61), (1, 1, 15, 113)]
    for kind in ("forward", "backward"):
        places = [place for place in recorded.spans(kind) if tracer.NONE not in place]
        assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("by_keyword", [False, True])
def test_without_a_loader_the_first_step_has_its_forward_too(
    tmp_path: Path, *, by_keyword: bool
) -> None:
    tracer.install(spool=tmp_path, run="plain", count_steps=True)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters())
    tokens = torch.ones(2, 8, dtype=torch.int64)
    for _ in range(3):
        (model(input_ids=tokens) if by_keyword else model(tokens)).sum().backward()
        optimizer.step()

    recorded = Recorded(tmp_path)
    assert recorded.tokens() == [(0, 16), (1, 16), (2, 16)]
    assert recorded.spans("forward") == recorded.spans("backward") == [(0, 0), (1, 0), (2, 0)]
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_by_default_the_first_optimizer_step_belongs_to_the_start_up(tmp_path: Path) -> None:
    tracer.install(spool=tmp_path, run="start")
    train_model(Model(), DataLoader(sequences(1, 2, 3)))  # type: ignore[arg-type]

    assert Recorded(tmp_path).tokens() == [(0, 2), (1, 3)]


@pytest.mark.parametrize("first", ["begin", "step"])
def test_reported_steps_replace_counted_ones(tmp_path: Path, first: str) -> None:
    tracer.install(spool=tmp_path, run="compiled_events")
    model = Model()
    loader: DataLoader[object] = DataLoader(sequences(1, 2, 3))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters())
    if first == "begin":
        tracer.begin_steps(40)
    for batch in loader:
        model(**batch).sum().backward()
        optimizer.step()
        tracer.step(tokens=100)

    expected = [(40, 100), (41, 100), (42, 100)] if first == "begin" else [(0, 100), (1, 100)]
    assert Recorded(tmp_path).tokens() == expected


def test_counted_tokens_are_added_to_reported_steps(tmp_path: Path) -> None:
    model = Model()
    tracer.install(spool=tmp_path, run="filled", model=model)
    tracer.begin_steps()
    for batch in DataLoader(sequences(5, 6)):  # type: ignore[arg-type]
        model(**batch)
        tracer.step()

    assert Recorded(tmp_path).tokens() == [(0, 5), (1, 6)]


def test_reported_micro_batches_are_not_recorded_twice(tmp_path: Path) -> None:
    model = Model()
    tracer.install(spool=tmp_path, run="once", model=model)
    tracer.begin_steps()
    tracer.microbatch(0, tokens=7, sum_squared_lengths=49)
    model(input_ids=torch.ones(1, 8, dtype=torch.int64))
    tracer.step()

    assert Recorded(tmp_path).microbatches() == [(0, 0, 7, 49)]


def test_batches_without_tokens_have_the_elements_of_their_tensors(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    tracer.install(spool=tmp_path, run="images", model=model)
    tracer.begin_steps()
    for num_samples in (3, 5):
        model(torch.ones(num_samples, 4)).sum().backward()
        tracer.step()

    rows = [row for row in Recorded(tmp_path).rows if row.record == RecordType.MICROBATCH]
    assert [MICROBATCH.unpack_from(row.second) for row in rows] == [
        (-1, -1, 0, 1 + 12),
        (-1, -1, 0, 1 + 20),
    ]


def test_prefetched_batches_belong_to_the_forward_that_gets_them(tmp_path: Path) -> None:
    model = Model()
    tracer.install(spool=tmp_path, run="ahead", model=model)
    tracer.begin_steps()
    batches = list(DataLoader(sequences(2, 3)))  # type: ignore[arg-type]
    for batch in batches:
        model(input_ids=batch["input_ids"])  # the model gets no mask; the loader had it
        tracer.step()

    assert Recorded(tmp_path).microbatches() == [(0, 0, 2, 4), (1, 0, 3, 9)]


@pytest.mark.slow
def test_each_next_is_a_data_span_and_the_end_of_the_data_no_error(tmp_path: Path) -> None:
    tracer.install(spool=tmp_path, run="data")
    assert len(list(DataLoader([1, 2], num_workers=1))) == 2  # type: ignore[arg-type]

    spans = [(row.name, row.flags) for row in Recorded(tmp_path).rows if row.kind == "data"]
    assert spans == [("start loader", SpanFlag.HOST_CLOCK)] + 3 * [
        ("next batch", SpanFlag.HOST_CLOCK)
    ]


def test_an_exception_of_the_dataset_reaches_the_job(tmp_path: Path) -> None:
    problem = KeyError("no such sample")

    class Broken:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            raise problem

    tracer.install(spool=tmp_path, run="broken")
    with pytest.raises(KeyError) as caught:
        next(iter(DataLoader(Broken())))  # type: ignore[arg-type]

    assert caught.value is problem
    (span,) = [row for row in Recorded(tmp_path).rows if row.name == "next batch"]
    assert SpanFlag.ERROR in span.flags


def test_prefetching_in_another_thread_ends_no_step(tmp_path: Path) -> None:
    tracer.install(spool=tmp_path, run="thread", count_steps=True)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(1, 8, dtype=torch.int64)).sum().backward()
    optimizer.step()
    ahead = threading.Thread(target=lambda: list(DataLoader(sequences(1, 2))))  # type: ignore[arg-type]
    ahead.start()
    ahead.join()

    assert [step for step, _ in Recorded(tmp_path).tokens()] == [0]  # at the end, by the shutdown


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage", "ignore:torch.distributed is unavailable")
def test_each_save_is_one_checkpoint_span(tmp_path: Path) -> None:
    tracer.install(spool=tmp_path / "spool", run="saves")
    state = {"weights": torch.ones(4)}
    torch.save(state, io.BytesIO())
    saver: Any = checkpoint

    def alone(save: Any) -> dict[str, bool]:  # noqa: ANN401
        return {"no_dist": True} if "no_dist" in inspect.signature(save).parameters else {}

    saver.save(state, checkpoint_id=tmp_path / "one", **alone(saver.save))
    two = tmp_path / "two"
    saver.async_save(state, checkpoint_id=two, **alone(saver.async_save)).result()

    spans = [row for row in Recorded(tmp_path / "spool").rows if row.kind == "checkpoint"]
    on_main = [row.name for row in spans if row.track == "main"]
    assert on_main == ["torch.save", "checkpoint.save", "checkpoint.async_save"]
    assert [row.name for row in spans if row.track != "main"] == ["checkpoint.save"]
    assert dropped(only_folder(tmp_path / "spool")) == {}


@pytest.mark.slow
def test_compilations_are_spans_and_events_and_add_no_graph_break(tmp_path: Path) -> None:
    def doubled(values: torch.Tensor) -> torch.Tensor:
        return values.sin() * 2

    def breaks() -> int:
        torch._dynamo.reset()
        explained = torch._dynamo.explain(doubled)(torch.ones(3))
        return int(explained.graph_break_count)

    before = breaks()
    tracer.install(spool=tmp_path, run="compiled")
    assert breaks() == before
    torch._dynamo.reset()
    compiled = torch.compile(doubled, backend="eager", dynamic=False)
    compiled(torch.ones(3))
    compiled(torch.ones(4))
    compiled(torch.ones(4))

    recorded = Recorded(tmp_path)
    # Before, torch does not report the compile id.
    again = ("recompile", "recompile 0/1") if TORCH >= "2.8" else ("compile", "compile")
    assert compilations(recorded)[-2:] == ["compile", again[0]]
    texts = recorded.events("compilation")
    assert texts[-2:] == ["compile 0/0" if TORCH >= "2.8" else "compile", again[1]]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_found_and_not_recompiled(tmp_path: Path, *, in_place: bool) -> None:
    torch._dynamo.reset()
    tracer.install(spool=tmp_path, run="compiled-model", count_steps=True)
    model: Any = Model()
    if in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    train_model(model, DataLoader(sequences(1, 2, 3)))  # type: ignore[arg-type]

    recorded = Recorded(tmp_path)
    assert compilations(recorded) == ["compile"]
    assert [step for step, _ in recorded.spans("forward")] == [0, 1, 2]


@pytest.mark.parametrize("with_gradients", [False, True])
def test_forwards_of_an_evaluation_are_no_micro_batches(
    tmp_path: Path, *, with_gradients: bool
) -> None:
    tracer.install(spool=tmp_path, run="evaluated", count_steps=True)
    inner = Model()
    wrapper = nn.Sequential()
    wrapper.module = inner  # as `DistributedDataParallel`, which an evaluation does not call
    optimizer = torch.optim.SGD(wrapper.parameters())
    tokens = torch.ones(2, 8, dtype=torch.int64)
    for _ in range(2):
        wrapper.train()
        wrapper(tokens).sum().backward()
        optimizer.step()
        wrapper.eval()
        with torch.set_grad_enabled(with_gradients):
            for _ in range(3):
                inner(tokens)

    recorded = Recorded(tmp_path)
    assert recorded.spans("forward") == [
        *[(0, 0), (1, -1), (1, -1), (1, -1)],
        *[(1, 0), (2, -1), (2, -1), (2, -1)],
    ]
    assert recorded.tokens()[:2] == [(0, 16), (1, 16)]


def test_training_in_evaluation_mode_has_micro_batches(tmp_path: Path) -> None:
    tracer.install(spool=tmp_path, run="frozen", count_steps=True)
    model = Model().eval()
    train_model(model, DataLoader(sequences(1, 2, 3)))  # type: ignore[arg-type]

    assert Recorded(tmp_path).spans("forward") == [(0, 0), (1, 0), (2, 0)]


def test_a_compiled_function_without_a_loader_is_not_recompiled(tmp_path: Path) -> None:
    torch._dynamo.reset()
    tracer.install(spool=tmp_path, run="compiled-function", count_steps=True)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters())
    compute_loss = torch.compile(lambda tokens: model(tokens).sum(), backend="eager")
    for _ in range(3):
        compute_loss(torch.ones(2, 8, dtype=torch.int64)).backward()
        optimizer.step()

    assert compilations(Recorded(tmp_path)) == ["compile"]


def test_a_model_that_the_first_optimizer_does_not_train_is_replaced(tmp_path: Path) -> None:
    class Larger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Model(), Model()

    larger = Larger()
    other = torch.optim.SGD(larger.parameters())
    tracer.install(spool=tmp_path, run="other")
    model = Model()
    train_model(model, DataLoader(sequences(1, 2, 3)))  # type: ignore[arg-type]

    # The first was before the first step.
    assert [step for step, _ in Recorded(tmp_path).spans("forward")] == [0, 1]
    assert not larger._forward_pre_hooks
    assert other.param_groups


def test_the_model_of_an_optimizer_that_trains_a_copy_of_its_weights_is_found(
    tmp_path: Path,
) -> None:
    # GIVEN an optimizer of one flat vector, as DeepSpeed's ZeRO has it
    tracer.install(spool=tmp_path, run="flat", count_steps=True)
    frozen, model = nn.Linear(64, 64).requires_grad_(requires_grad=False), Model()
    flat = nn.Parameter(torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    optimizer = torch.optim.SGD([flat])

    for batch in DataLoader(sequences(1, 2, 3)):  # type: ignore[arg-type]
        model(**batch).sum().backward()
        optimizer.step()

    assert Recorded(tmp_path).spans("forward") == [(0, 0), (1, 0), (2, 0)]
    assert frozen.in_features == 64


class Encoder(nn.Module):
    """Is called by a method, so that only its part is called as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Coder()

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.encoder(tokens)
        return out


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table(tokens)
        return out


def forwards(tmp_path: Path) -> list[tuple[int, int]]:
    """Return step and micro-batch of each forward, in order of time."""
    rows = [row for row in Recorded(tmp_path).rows if row.name == "forward"]
    return [(row.step, row.microbatch) for row in sorted(rows, key=lambda row: row.start_ns)]


@pytest.mark.parametrize("has_method", [False, True])
def test_a_frozen_module_of_the_job_is_no_idle_time(tmp_path: Path, *, has_method: bool) -> None:
    tracer.install(spool=tmp_path, run="frozen", count_steps=True)
    teacher: Any = (Encoder() if has_method else Coder()).eval().requires_grad_(requires_grad=False)
    kind = type(teacher)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters())
    tokens = torch.ones(2, 8, dtype=torch.int64)
    for _ in range(3):
        with torch.no_grad():
            wanted = teacher.encode(tokens) if has_method else teacher(tokens)
        (model(tokens) - wanted).sum().backward()
        optimizer.step()

    assert forwards(tmp_path) == [(step, number) for step in range(3) for number in (NONE, 0)]
    tracer.shutdown()
    assert "__call__" not in kind.__dict__


def test_a_second_module_that_is_trained_is_a_part_of_its_micro_batch(tmp_path: Path) -> None:
    tracer.install(spool=tmp_path, run="two towers", count_steps=True)
    text, images = Coder(), Model()
    images.more = nn.Linear(64, 64)
    optimizer = torch.optim.SGD([*text.parameters(), *images.parameters()])
    tokens = torch.ones(2, 8, dtype=torch.int64)
    for index in range(4):
        (text(tokens) * images(tokens)).sum().backward()
        if index % 2:
            optimizer.step()

    assert forwards(tmp_path) == [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0), (1, 1), (1, 1)]


def test_a_module_of_a_class_that_the_model_has_inside_is_left_alone(tmp_path: Path) -> None:
    tracer.install(spool=tmp_path, run="inside", count_steps=True)
    projection, model = nn.Linear(10, 10), Model()
    optimizer = torch.optim.SGD(model.parameters())
    tokens = torch.ones(2, 8, dtype=torch.int64)
    for _ in range(2):
        projection(model(tokens)).sum().backward()
        optimizer.step()
    assert "__call__" not in nn.Linear.__dict__

    assert forwards(tmp_path) == [(0, 0), (1, 0)]


def test_a_job_without_an_optimizer_has_a_step_for_each_forward_after_a_backward(
    tmp_path: Path,
) -> None:
    tracer.install(spool=tmp_path, run="own update", count_steps=True)
    model = Model()
    tokens = torch.ones(2, 8, dtype=torch.int64)
    for _ in range(3):
        out = model(tokens)
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()  # another loss of the same step
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)

    recorded = Recorded(tmp_path)
    assert [step for step, _ in recorded.spans("forward")] == [0, 1, 2]
    assert [step for step, _ in recorded.spans("backward")] == [0, 0, 1, 1, 2, 2]
    assert recorded.tokens() == [(0, 16), (1, 16), (2, 16)]
    assert any("no optimizer exists" in text for text in recorded.events("tracer"))


def test_an_optimizer_that_has_not_stepped_yet_is_no_job_without_one(tmp_path: Path) -> None:
    tracer.install(spool=tmp_path, run="accumulates", count_steps=True)
    model = Model()
    train_model(model, DataLoader(sequences(1, 2, 3, 4)), accumulate=2)  # type: ignore[arg-type]

    assert Recorded(tmp_path).spans("forward") == [(0, 0), (0, 1), (1, 0), (1, 1)]

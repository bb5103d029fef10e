"""A training that saves, copies and compiles its model in the ways that people do.

    saving_job.py save FOLDER    prints a JSON object: the outcome of each way
    saving_job.py load FOLDER ...    loads their files without rankscope; prints a list of the same

It is a job of its own: it imports nothing of the project, unless the environment asks for it.
"""

import copy
import functools
import inspect
import io
import json
import multiprocessing
import os
import pickle  # noqa: TID251 - its own files
import sys
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import dill  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import fx, nn, save
from torch.distributed import new_group
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
library: Any = torch  # parts of which have no types
saver: Any = dcp
X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x of shape (batch, 4), transformed."""
        out: torch.Tensor = x + self.inner(x)
        return out


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one value for each row of x."""
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


class LowRank(nn.Module):
    """An adapter of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(1, 4)), nn.Parameter(torch.zeros(1, 1))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the adapted weight."""
        return weight + self.b @ self.a


class Saver:
    """An object of the job that keeps functions of torch."""

    def __init__(self) -> None:
        self.functions = [save, functools.partial(torch.save, pickle_protocol=4), new_group]


class Job:
    """A model, what trains it, and the folder for its files."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.model: Any = self.wrap(Model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.loader = DataLoader(TensorDataset(X), batch_size=2)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model as it is trained."""
        return model

    def train(self) -> None:
        """Train one step."""
        for (x,) in self.loader:
            self.model(x).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()


class NameReader(pickle.Unpickler):
    """Notes the classes and functions that a pickle refers to."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.names: set[str] = set()

    def find_class(self, module_name: str, global_name: str, /) -> Any:  # noqa: ANN401
        self.names.add(f"{module_name}.{global_name}")
        return super().find_class(module_name, global_name)


def list_names(value: object) -> list[str]:
    """Return the classes and functions that the value's pickle refers to."""
    reader = NameReader(pickle.dumps(value))
    reader.load()
    return sorted(reader.names)


def plain(value: Any) -> object:  # noqa: ANN401 - a state, nested
    """Return the value with numbers in place of its tensors."""
    if isinstance(value, torch.Tensor):
        return (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else str(value)


def describe(module: Any) -> list[object]:  # noqa: ANN401 - a module, or a function that is one
    """Return what a copy of the model computes, its hooks and the names of its attributes."""
    parts = list(module.modules()) if isinstance(module, nn.Module) else []
    hooks = sum(len(part.__dict__.get(name, ())) for part in parts for name in HOOKS)
    names = sorted({name for part in parts for name in part.__dict__})
    with torch.no_grad():
        dtype = next(iter(module.parameters())).dtype if parts else X.dtype
        return [module(X.to(dtype)).float().flatten().tolist(), hooks, names]


WAYS: dict[str, Callable[[Job], object]] = {}


def way(run: Callable[[Job], object]) -> Callable[[Job], object]:
    """Add a way to `WAYS`."""
    WAYS[run.__name__] = run
    return run


def stored(job: Job, name: str, value: object) -> Any:  # noqa: ANN401
    """Save a value for the other process, and return it loaded."""
    torch.save(value, job.folder / f"{name}.pt")
    return torch.load(job.folder / f"{name}.pt", weights_only=False)


@way
def save_model(job: Job) -> object:
    return describe(stored(job, "model", job.model))


@way
def save_states(job: Job) -> object:
    return plain(stored(job, "states", [job.model.state_dict(), job.optimizer.state_dict()]))


@way
def save_optimizer_and_scheduler(job: Job) -> object:
    kept = [stored(job, "optimizer", job.optimizer), stored(job, "scheduler", job.scheduler)]
    return [list_names(kept), [plain(one.state_dict()) for one in kept]]


@way
def pickle_model(job: Job) -> object:
    (job.folder / "model.pkl").write_bytes(pickle.dumps(job.model))
    return list_names(job.model)


@way
def pickle_by_value(job: Job) -> object:
    data = dill.dumps(job.model, byref=False)
    (job.folder / "model.dill").write_bytes(data)
    return [b"rankscope" in data, describe(dill.loads(data))]


@way
def deep_copy(job: Job) -> object:
    copied = copy.deepcopy(job.model)
    return [describe(copied), list_names(copied)]


@way
def half_of_a_copy(job: Job) -> object:
    checkpoint = {"epoch": 1, "model": copy.deepcopy(job.model).half()}
    return describe(stored(job, "half", checkpoint)["model"])


@way
def shallow_copy(job: Job) -> object:
    return describe(copy.copy(job.model))


@way
def averaged_model(job: Job) -> object:
    average = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
    averaged = AveragedModel(job.model, multi_avg_fn=average)
    averaged.update_parameters(job.model)
    return describe(stored(job, "averaged", averaged.module))


@way
def moving_average(job: Job) -> object:
    ema = copy.deepcopy(job.model).eval().requires_grad_(requires_grad=False)
    with torch.no_grad():
        for mean, now in zip(ema.parameters(), job.model.parameters(), strict=True):
            mean.lerp_(now, 0.1)
    return describe(stored(job, "ema", ema))


@way
def script(job: Job) -> object:
    scripted = torch.jit.script(job.model)
    torch.jit.save(scripted, job.folder / "script.jit")
    return [scripted(X).tolist(), scripted.code]


@way
def script_function(job: Job) -> object:
    def backward(x: torch.Tensor) -> None:
        torch.autograd.backward([x.sum()])

    return str(torch.jit.script(backward).graph).count("aten::backward")


@way
def trace(job: Job) -> object:
    traced = library.jit.trace(job.model, X)
    torch.jit.save(traced, job.folder / "trace.jit")
    return [traced(X).tolist(), traced.code]


@way
def symbolic_trace(job: Job) -> object:
    graph = fx.symbolic_trace(job.model)
    whole = fx.symbolic_trace(nn.Sequential(job.model, nn.Tanh()))
    return [describe(stored(job, "graph", graph)), graph.code, whole.code]


@way
def export(job: Job) -> object:
    programs = [torch.export.export(job.model, (X,), strict=strict) for strict in (False, True)]
    torch.export.save(programs[0], job.folder / "program.pt2")
    return [str(one.graph) for one in programs]


@way
def compile_model(job: Job) -> object:
    compiled: Any = torch.compile(copy.copy(job.model), backend="eager", fullgraph=True)
    compiled.load_state_dict(stored(job, "compiled", compiled.state_dict()))
    return [describe(compiled), sorted(compiled.state_dict())]


@way
def compile_in_place(job: Job) -> object:
    model = copy.deepcopy(job.model)
    model.compile(backend="eager", fullgraph=True)
    return [describe(model), describe(stored(job, "in-place", model)), list_names(model)]


@way
def compile_function(job: Job) -> object:
    """Compile what calls the model itself: no graph may break."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, example: object) -> Any:  # noqa: ANN401
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: job.model(x).sum(), backend=backend, fullgraph=True)
    return [float(compiled(X)), [node.op for graph in graphs for node in graph.graph.nodes]]


@way
def quantize(job: Job) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = library.ao.quantization.quantize_dynamic(job.model, {nn.Linear})
    return [type(quantized.head).__name__, quantized(X).shape]


@way
def low_rank_adapter(job: Job) -> object:
    adapted = copy.deepcopy(job.model)
    parametrize.register_parametrization(adapted.head, "weight", LowRank())
    adapter = {name: it for name, it in adapted.state_dict().items() if "parametr" in name}
    parametrize.remove_parametrizations(adapted.head, "weight")
    return [plain(stored(job, "adapter", adapter)), describe(stored(job, "merged", adapted))]


@way
def stacked_states(job: Job) -> object:
    parameters, buffers = torch.func.stack_module_state([job.model, copy.deepcopy(job.model)])
    called = torch.func.functional_call(job.model, dict(job.model.named_parameters()), (X,))
    return [sorted(parameters), sorted(buffers), called.tolist()]


@way
def functions(job: Job) -> object:
    kept: list[Any] = [
        *(torch.save, torch.serialization.save, save, torch.load, torch.compile),
        *(
            torch.autograd.backward,
            torch.autograd.grad,
            dist.all_reduce,
            saver.save,
            saver.async_save,
        ),
        *(dist.init_process_group, dist.new_group, new_group, dist.destroy_process_group),
        *(DataLoader.__iter__, Model.forward, saver.save, saver.async_save),
    ]
    (job.folder / "functions.pkl").write_bytes(pickle.dumps([*kept, Model.__call__]))
    (job.folder / "saver.dill").write_bytes(dill.dumps(Saver()))
    about = [[it.__module__, it.__qualname__, str(inspect.signature(it))] for it in kept]
    return [about, list_names(kept), list_names(Saver()), str(inspect.signature(job.model))]


@way
def loader(job: Job) -> object:
    return list_names(job.loader)


@way
def scaler(job: Job) -> object:
    return list_names(torch.amp.GradScaler("cpu"))


def compute_in_child(model: nn.Module, queue: Any) -> None:  # noqa: ANN401
    """Send the model's output from a process that was spawned with it."""
    queue.put(model(X).tolist())


@way
def spawn(job: Job) -> object:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=compute_in_child, args=(copy.copy(job.model), queue))
    process.start()
    computed = queue.get(timeout=120)
    process.join()
    return computed


@way
def queue_to_another_process(job: Job) -> object:
    return describe(pickle.loads(bytes(ForkingPickler.dumps(job.model))))


@way
def distributed_checkpoint(job: Job) -> object:
    saver.save({"model": job.model.state_dict()}, checkpoint_id=job.folder / "dcp")
    return sorted(path.name for path in (job.folder / "dcp").iterdir())


class DdpJob(Job):
    """The same with DistributedDataParallel."""

    def wrap(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)


class FsdpJob(Job):
    """The same with FSDP2."""

    def wrap(self, model: Any) -> Any:  # noqa: ANN401
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)


def ddp(job: Job) -> object:
    buffer = io.BytesIO()
    torch.save(job.model, buffer)
    inner = job.model.module
    return [
        describe(copy.deepcopy(job.model)),
        describe(stored(job, "ddp", inner)),
        describe(torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)),
        list_names(inner),
        plain(stored(job, "ddp-state", job.model.state_dict())),
    ]


def fsdp(job: Job) -> object:
    saver.save({"model": get_model_state_dict(job.model)}, checkpoint_id=job.folder / "fsdp")
    states = {name: it.full_tensor() for name, it in job.model.state_dict().items()}
    return [plain(stored(job, "fsdp", states)), attempt(copy.deepcopy, job.model)]


def attempt(run: Callable[..., object], *args: object) -> object:
    """Return the outcome of a call, which may be an exception."""
    try:
        return run(*args)
    except Exception as problem:  # noqa: BLE001
        return [type(problem).__name__, str(problem)[:200]]


def run_ways(job: Job, ways: dict[str, Callable[[Job], object]]) -> dict[str, object]:
    """Train, go each way, and train on after each."""
    for _ in range(2):
        job.train()
    outcomes: dict[str, object] = {}
    for name, run in ways.items():
        outcomes[name] = attempt(run, job)
    job.train()
    return outcomes | {f"{type(job).__name__} afterwards": plain(job.model.state_dict())}


def load(path: Path) -> object:
    """Load a file as its user does."""
    if path.suffix == ".jit":
        return library.jit.load(path)(X).tolist()
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(X).tolist()
    if path.suffix == ".pt":
        value = torch.load(path, weights_only=False)
    else:
        value = {".dill": dill, ".pkl": pickle}[path.suffix].loads(path.read_bytes())
    return describe(value) if isinstance(value, nn.Module) else type(value).__name__


def main() -> None:
    """Print the outcomes."""
    command, folder = sys.argv[1], Path(sys.argv[2])
    torch.use_deterministic_algorithms(mode=True)
    if command == "load":
        sys.modules["rankscope"] = None  # type: ignore[assignment]
        folders = [sorted(filter(Path.is_file, Path(one).iterdir())) for one in sys.argv[2:]]
        loaded = [{path.name: attempt(load, path) for path in files} for files in folders]
        print(json.dumps(loaded))  # noqa: T201
        return
    if os.environ.get("INSTALLS"):
        from rankscope import tracer

        tracer.install(count_steps=True)
    outcomes = run_ways(Job(folder), WAYS)
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    outcomes |= run_ways(DdpJob(folder), {"ddp": ddp}) | run_ways(FsdpJob(folder), {"fsdp": fsdp})
    dist.destroy_process_group()
    print(json.dumps(outcomes))  # noqa: T201


if __name__ == "__main__":
    main()

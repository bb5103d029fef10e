"""No input file can bring code: a walk over the sources finds calls that would run it."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PACKAGES = (
    "analysis",
    "collector",
    "dashboard",
    "src/rankscope",
    "tracer",
    "trainer",
    "benchmarks",
)

LOADERS = frozenset(
    {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    | {"jsonpickle", "runpy", "code", "zipfile", "tarfile", "shutil.unpack_archive"}
)
"""Modules that create objects, code or files from their input."""

BARE_CALLS = frozenset({"eval", "exec", "__import__"})
METHODS = frozenset(
    {"read_pickle", "allow_pickle", "unsafe_load", "full_load", "load_all", "unpack_archive"}
    | {"extractall", "os.system", "os.popen", "all_gather_object", "broadcast_object_list"}
    | {"gather_object", "scatter_object_list", "recv_object_list"}
)
PLAIN_LOADERS = {"torch.load": "weights_only", "np.load": "", "numpy.load": "", "yaml.load": ""}
"""Calls that need this argument, set to True."""

ALLOWED = {
    # `python -m rankscope.tracer SCRIPT` runs the script, as `python SCRIPT` does.
    "tracer/__main__.py: exec",
    "tracer/__main__.py: runpy",
    # Modules of our own, from a fixed table.
    "src/rankscope/__init__.py: import_module",
    "benchmarks/ablation.py: import_module",
    # Packages of trackers, by name from a fixed table.
    "src/rankscope/loggers/records.py: import_module",
    # Writes, and reads none.
    "benchmarks/comparison/read_flight_recorder.py: pickle",
}


def offences(source: str) -> Iterator[str]:
    """Yield the calls and imports of a source that may run code from a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in LOADERS)
        elif isinstance(node, ast.ImportFrom):
            if node.module in LOADERS:
                yield str(node.module)
            yield from (name.name for name in node.names if name.name in METHODS)
        elif isinstance(node, ast.Call):
            yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[str]:
    called = ast.unparse(node.func)
    keywords = {word.arg: word.value for word in node.keywords}
    if called in BARE_CALLS or called in METHODS or called.rpartition(".")[2] in METHODS:
        yield called
    if called in PLAIN_LOADERS and not _is_true(keywords.get(PLAIN_LOADERS[called])):
        yield called
    yield from (word for word in ("allow_pickle", "shell") if _is_true(keywords.get(word)))
    if called.endswith("import_module") and not all(
        isinstance(argument, ast.Constant) for argument in node.args
    ):
        yield called


def _is_true(value: ast.expr | None) -> bool:
    return value is not None and not (isinstance(value, ast.Constant) and value.value is False)


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.slow
def test_our_sources_load_no_pickle_and_run_no_input() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {offence}"
        for path in sources()
        for offence in offences(path.read_text(encoding="utf-8"))
    }

    assert len(sources()) > 300
    assert found == ALLOWED


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "pd.read_pickle(path)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "eval(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "importlib.import_module(text)",
        "file.extractall()",
    ],
)
def test_the_walk_finds_calls_that_run_code(source: str) -> None:
    assert list(offences(source))


@pytest.mark.parametrize(
    "source", ["torch.load(path, weights_only=True)", "yaml.safe_load(text)", "json.loads(text)"]
)
def test_the_walk_accepts_safe_calls(source: str) -> None:
    assert not list(offences(source))

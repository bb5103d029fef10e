"""Advice of an installation without an extra, and its version."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib

import pytest

import rankscope
from rankscope.extras import MODULES, advise_install, extra_of, installed_version
from tests.support.paths import ROOT

PACKAGES = {
    "clickhouse_connect": "clickhouse-connect",
    "dash_ag_grid": "dash-ag-grid",
    "dash_mantine_components": "dash-mantine-components",
    "prometheus_client": "prometheus-client",
    "pydantic_core": "pydantic",
    "pynvml": "nvidia-ml-py",
    "typing_extensions": "typing-extensions",
    "yaml": "pyyaml",
}
"""Packages whose name is not that of their module."""

OPTIONAL = {"lightning", "pytorch_lightning", "safetensors", "transformers", "megatron", "IPython"}
"""Modules of the job or the notebook, which are used where they are."""


def missing(module: str, *arguments: str, store: str = "") -> str | None:
    error = ModuleNotFoundError(name=module)
    return advise_install(error, user="the command", arguments=arguments, store=store)


@pytest.mark.parametrize(
    ("module", "arguments", "store", "extra"),
    [
        ("numpy", ("agent", "--spool", "x"), "", "agent"),
        ("typer", ("analyze", "run"), "", "embedded"),
        ("typer", ("serve",), "clickhouse://host/db", "server"),
        ("dash.dcc", ("serve", "--store", "clickhouse://host/db"), "", "server"),
        ("dash", ("serve",), "", "embedded"),
        ("chdb", ("serve",), "", "embedded"),
        ("apprise", ("serve",), "", "alerts"),
        ("mcp.server", ("mcp",), "", "mcp"),
    ],
)
def test_the_advice_is_one_installation_that_is_enough(
    module: str, arguments: tuple[str, ...], store: str, extra: str
) -> None:
    said = missing(module, *arguments, store=store)

    assert said is not None
    assert said.endswith(f'the command needs it: pip install "rankscope[{extra}]"')
    assert "\n" not in said


def test_a_module_of_rankscope_or_of_the_job_is_no_missing_extra() -> None:
    assert missing("rankscope.nonsense") is None
    assert missing("transformers") is None


def test_each_module_is_installed_by_its_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra, modules in MODULES.items():
        declared = {text.partition(">=")[0] for text in project["optional-dependencies"][extra]}
        own = {"pydantic_core"}  # comes with pydantic, which is the agent's
        for module in modules - own:
            assert PACKAGES.get(module, module) in declared, (extra, module)


def test_each_module_that_is_imported_is_declared() -> None:
    imported = set()
    for folder in ("analysis", "collector", "dashboard", "trainer", "src/rankscope"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    imported.add(node.module.partition(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - {"rankscope", "_typeshed"} - OPTIONAL

    assert {module for module in foreign if extra_of(module) is None} == set()


def test_without_its_extra_the_library_says_how_to_get_it() -> None:
    # A None in sys.modules makes the import fail as if the package were not there.
    program = "import sys; sys.modules['numpy'] = None; import rankscope; rankscope.open_run"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: numpy is not installed, and rankscope.open_run needs it:"
        ' pip install "rankscope[embedded]"'
    )


def test_the_version_needs_no_extra_and_all_else_says_how_to_get_it() -> None:
    program = (
        "import sys; sys.modules['typer'] = None; from rankscope.__main__ import main;"
        "sys.argv[1:] = ['--version']; assert main() == 0; sys.argv.pop(); sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert rankscope.__version__ == installed_version()
    assert (done.returncode, done.stdout) == (2, f"rankscope {installed_version()}\n")
    # AND without the version, one line says how to get the extra
    assert done.stderr == (
        "rankscope: typer is not installed, and the command needs it:"
        ' pip install "rankscope[embedded]"\n'
    )

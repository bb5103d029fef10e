"""The examples of the docstrings and of docs/notebooks.md, run on two simulated runs."""

from __future__ import annotations

import doctest
import re
from typing import TYPE_CHECKING, Any

import pandas as pd  # type: ignore[import-untyped]
import pytest

import rankscope
from rankscope import Part, Run, compare, open_run, query
from rankscope.analysis.goodput import GoodputPart
from rankscope.collector.store.store import open_store
from rankscope.commands.simulate import simulate_run
from rankscope.simulation import SimulateOptions
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "notebooks.md"
FAULTS = {"monday": (), "tuesday": ("slow-compute:rank=2,factor=1.6,steps=6-12",)}
ENTRY_POINTS = (open_run, query, rankscope.runs, compare)
RESULTS = [
    value
    for name, value in vars(Run).items()
    if callable(value) and not name.startswith("_") and name != "close"
]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Return the names that the examples use, with runs ``monday`` and ``tuesday`` stored."""
    url = f"chdb://{tmp_path_factory.mktemp('store')}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANKSCOPE_STORE", url)
        for run_id, faults in FAULTS.items():
            simulate_run(
                SimulateOptions(
                    scenario="healthy",
                    run_id=run_id,
                    num_ranks=8,
                    num_steps=13,
                    seed=3,
                    faults=faults,
                )
            )
        with open_store(url), open_run("tuesday") as run:
            yield {"rankscope": rankscope, "Part": Part, "run": run}


@pytest.mark.parametrize("documented", [*ENTRY_POINTS, *RESULTS], ids=lambda one: one.__name__)
def test_the_example_of_a_docstring_runs(documented: Any, names: dict[str, Any]) -> None:  # noqa: ANN401
    examples = doctest.DocTestParser().get_examples(documented.__doc__)

    assert examples
    for example in examples:
        exec(example.source, dict(names))


def questions() -> dict[str, str]:
    text = PAGE.read_text(encoding="utf-8").split("\n## Questions\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^([A-Z].*\?)\n\n```python\n([^`]*)\n```", text, re.MULTILINE))


def test_each_question_of_the_page_is_one_line(names: dict[str, Any]) -> None:
    known: dict[str, Any] = {}
    exec("import pandas\nfrom rankscope import Part, compare, open_run, query, runs", known)
    answers = {}
    for question, line in questions().items():
        *before, last = line.splitlines()
        exec("\n".join(before), known)
        answers[question] = eval(last, known)

    assert len(answers) == 33
    assert answers["What is wrong?"] == names["run"].verdict
    assert answers["Which ranks are slow?"]["rank"].iloc[0] == 2
    assert answers["Which ranks waited the least in step 12?"].index[0] == 2
    (hours,) = (answer for question, answer in answers.items() if "GPU-hours" in question)
    assert max(hours, key=hours.__getitem__) in {GoodputPart.PRODUCTIVE, GoodputPart.FINDINGS}
    (waits,) = (answer for question, answer in answers.items() if "do the others wait" in question)
    assert waits.index[0] == 2
    assert answers["What would be saved if rank 2 were healthy?"] > 0.8
    assert all(isinstance(answers[one], pd.DataFrame) for one in list(questions())[2:4])
    known["run"].close()

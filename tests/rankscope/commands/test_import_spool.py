"""`rankscope import --format rankscope`: a spool whose jobs have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.store.store import open_store
from rankscope.commands.import_trace import import_files
from rankscope.errors import BadInputError
from rankscope.sources.store_source import StoreSource
from tests.support.paths import ROOT
from tests.support.tracer.recording import run_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

STEPS = """
    from rankscope import tracer
    tracer.install()
    tracer.begin_steps()
    for _ in range(3):
        for _ in range(50):
            with tracer.span("x", kind="forward"):
                pass
        tracer.step()
    """


def bring(spool: Path, store: Path, *, run: str | None = None) -> str:
    return import_files(
        [spool], file_format="rankscope", run_id=run, meta=None, store_url=f"chdb://{store}"
    )


def num_spans(store: Path) -> dict[str, int]:
    with open_store(f"chdb://{store}") as opened:
        return {run.run_id: run.num_spans for run in StoreSource(opened).runs()}


def test_a_spool_is_stored_once_and_stays_as_it_is(tmp_path: Path) -> None:
    spool, store = tmp_path / "spool", tmp_path / "store"
    assert run_script(STEPS, spool).returncode == 0
    before = {path: path.read_bytes() for path in spool.rglob("*") if path.is_file()}

    said = bring(spool, store)

    (stored,) = num_spans(store).values()
    assert stored >= 150
    assert said == f"imported run run: {stored:,} spans. Next: rankscope analyze run"
    assert {path: path.read_bytes() for path in spool.rglob("*") if path.is_file()} == before
    assert bring(spool, store) == f"{spool} is already stored: nothing was written"
    assert num_spans(store) == {"run": stored}


def test_one_run_of_several_is_chosen(tmp_path: Path) -> None:
    spool, store = tmp_path / "spool", tmp_path / "store"
    for name in ("one", "two"):
        assert run_script(STEPS, spool, RANKSCOPE_RUN=name).returncode == 0

    said = bring(spool, store, run="two")

    assert "imported run two" in said
    assert set(num_spans(store)) == {"two"}
    with pytest.raises(BadInputError, match="holds no run three"):
        bring(spool, store, run="three")


def test_the_spool_of_a_killed_job_is_stored_whole(tmp_path: Path) -> None:
    spool, store = tmp_path / "spool", tmp_path / "store"
    done = run_script(STEPS + f"\n    import os; os.kill(os.getpid(), {signal.SIGKILL})", spool)
    assert done.returncode == -signal.SIGKILL

    bring(spool, store)

    assert num_spans(store)["run"] >= 150


def test_a_spool_that_a_job_still_writes_is_refused(tmp_path: Path) -> None:
    spool, store = tmp_path / "spool", tmp_path / "store"
    script = (
        "import sys; from rankscope import tracer; tracer.install(); print(flush=True);"
        " sys.stdin.read()"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "RANKSCOPE_TRACE": str(spool), "RANKSCOPE_RUN": "run"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with job:
        assert job.stdout is not None
        job.stdout.readline()
        with pytest.raises(BadInputError, match="ranks of this host still run"):
            bring(spool, store)
        assert job.stdin is not None
        job.stdin.close()


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("missing", {}, "is not a folder"),
        ("", {"meta": "x"}, "--meta belongs to"),
        ("", {"file_format": "chrom"}, "not supported: give bytedance, "),
        ("", {"file_format": "bytedance"}, "needs --run NAME"),
        ("", {}, "holds no run"),
    ],
)
def test_wrong_input_says_what_to_give(
    path: str, options: dict[str, str], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    meta = tmp_path / "meta.yaml" if "meta" in options else None
    with pytest.raises(BadInputError, match=message):
        import_files(
            [folder / path],
            file_format=options.get("file_format", "rankscope"),
            run_id=None,
            meta=meta,
            store_url=f"chdb://{tmp_path / 'store'}",
        )

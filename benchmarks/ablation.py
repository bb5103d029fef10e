"""Worth of each rule of the diagnosis: what becomes wrong without it.

    RANKSCOPE_TRACE_DIR=... python -m benchmarks.ablation [--seed 71] [--share 0.04] [--num 32]
        [--real FOLDER] [--sets SET ...] [--rules TEXT ...]

A rule is a detector, an explanation of one finding by another, a guard, or a rule of the readers.
Every run is read and replayed once. Then each rule in turn is replaced by its absence (`RULES`),
the detectors search again, and the findings are compared with the labels. For a rule of the readers
the run is read and replayed again. Prints the table of docs/diagnosis.md. The published traces have
no labels: it says whether their findings change. ``--real`` is a folder of
`benchmarks.real_scripts`. *Other* counts the runs with as many errors and other findings: one more
that names the same fault, other steps, or a price that differs by 5 %.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import numpy as np

from benchmarks.diagnosis_scenarios import Labelled, scenarios
from benchmarks.diagnosis_summary import wrongs_of_scenario
from benchmarks.independent.__main__ import case_by_number, samples_of
from benchmarks.independent.memory import MemorySource, read_spool
from benchmarks.independent.run_one import clocks_of, lay_out, step_bounds
from benchmarks.independent.score import NO_ALARM, wrongs_of
from benchmarks.independent.spool_bytes import SpoolOptions, write_spool
from benchmarks.real_scripts.__main__ import HEALTHY, JOBS, culprit_of, right_causes
from rankscope.analysis import analyze, diagnose
from rankscope.analysis.causes.detector import Record
from rankscope.analysis.causes.order import FROM_RECORDS, FROM_REPLAY
from rankscope.analysis.price.findings import price_candidates
from rankscope.analysis.statistics.thresholds import THRESHOLDS
from rankscope.collector.importers.bytedance import import_bytedance
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from rankscope.sources.store_source import StoreSource
from rankscope.spool_check import read_spool as read_finished
from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Noise, Scenario, Sends, TpDetail
from rankscope.trainer.simulator.schedule import Schedule
from tests.support.rankscope.simulated_source import SimulatedSource
from tests.support.traces import TRACES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import ModuleType

    from benchmarks.independent.cases import Case
    from rankscope.analysis.causes.candidate import Candidate
    from rankscope.analysis.report.report import Finding
    from rankscope.analysis.trace.tables import SpanSource

MOST_SPANS = 150_000
"""Larger runs are left out: they take most of the time and have no rule of their own."""

PACKAGES = ("causes", "statistics", "price", "readers", "readers.tracer", "readers.bytedance")


def _first(found: Any, *_: object, **__: object) -> Any:  # noqa: ANN401  # what the rule returns
    return found


def _never(*_: object, **__: object) -> bool:
    return False


def _none(*_: object, **__: object) -> tuple[()]:
    return ()


def _always(*_: object, **__: object) -> bool:
    return True


def _no_gaps(_: object, size: Any, **__: object) -> Any:  # noqa: ANN401
    return np.zeros(size if isinstance(size, int) else 0, dtype=np.bool_)


def _none_of_last(*given: Any, **__: object) -> Any:  # noqa: ANN401
    return np.zeros(len(given[-1]), dtype=np.bool_)


def _none_of_first(given: Any, *_: object, **__: object) -> Any:  # noqa: ANN401
    return np.zeros(len(given), dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule, and what replaces it."""

    name: str
    attribute: str
    """Name of a function of `analysis`, replaced wherever it is imported; or of a threshold."""

    absent: Any
    is_of_reader: bool = False
    """Whether the run must be read and replayed again."""

    @property
    def is_of_price(self) -> bool:
        """Return whether it changes prices, and not only what is priced."""
        modules = (each for each in MODULES if ".price." in each.__name__)
        return any(hasattr(each, self.attribute) for each in modules)


def _detector_rule(detector: object) -> Rule:
    name = cast("ModuleType", detector).__name__.rpartition(".")[2]
    return Rule(f"detector `{name}`", "", detector)


RULES = (
    *(_detector_rule(each) for each in (*FROM_RECORDS, *FROM_REPLAY)),
    Rule("ranks of one host are one finding", "merge_hosts", _first),
    Rule("equally slow ranks are one finding", "merge_equal", _first),
    Rule("a lower clock explains its share", "explain_by_clock", lambda slow, *_: (slow,)),
    Rule("a stage without its slow ranks", "_without_slow_ranks", _first),
    Rule("an explained gap is no other finding", "explained_gaps", _no_gaps),
    Rule("stages of late ranks", "_late_stages", _none),
    Rule("pauses of one length", "_split_by_length", lambda _, some: [np.flatnonzero(some)]),
    Rule("pauses at equal distances are planned", "_is_regular", _never),
    Rule("a stall lasts in most of its steps", "_is_persistent", _always),
    Rule("pauses are in turn", "_is_in_turn", _always),
    Rule("no pauses in three steps in a row", "_in_consecutive_steps", _none_of_last),
    Rule("a pause too rare", "find_rare_pauses", _none),
    Rule("a skew begins before its phase", "_extend_to_onset", _first),
    Rule("ranks whose experts get more tokens", "find_expert_imbalance", lambda *_: None),
    Rule("small groups before large ones", "_smallest_groups", lambda groups, _: list(groups)),
    Rule("experts explain a stage", "mark_explained_stages", lambda found, *_: tuple(found)),
    Rule("a slow device explains its links", "is_explained_by_devices", _never),
    Rule("links of one place are one finding", "merge_by_location", _first),
    Rule("single slow steps of a network", "_find_single_steps", lambda *_: None),
    Rule("counters judge an only group", "judge_only_groups", lambda *given: given[1]),
    Rule("few alike ones: its other steps", "_differs_from_other_steps", _always),
    Rule("lengths that were not declared", "equalize_inferred_lengths", lambda *_: None),
    Rule("lengths of experts", "equalize_experts", lambda *given: given[2:]),
    Rule("rows that are slow together", "find_slow_together", None),
    Rule("a phase differs by Student's t", "is_significant", _always),
    Rule("peers without those slow together", "are_usual", None),
    Rule("few peers need confirmation", "_confirmed_peers", lambda *given: given[2]),
    Rule("what the healthy rows show (1.5 x)", "_peer_peaks", lambda rows, _: np.zeros(len(rows))),
    Rule("5 % in 5 steps, not 9 %", "persistent_ratio", 0.09),
    Rule("7.5 % with few peers", "few_peers_persistent_ratio", 0.05),
    Rule("9 % in short phases", "min_excess_ratio", 0.05),
    Rule("0.5 % of the rows may be at fault", "max_faulty_share", 0.0),
    Rule("a whole stage or host (80 %)", "whole_share", 0.5),
    Rule("pauses of 10 x the usual gap", "pause_factor", 1.0),
    Rule("1 % of the time for a second fault, or pauses", "min_loss_ratio", 1e-9),
    Rule("an only group may be the network", "are_only_groups", _never),
    Rule("one culprit explains a slow network", "has_one_location", _never),
    Rule("a step may be long as a whole", "common_share", 1.1),
    Rule("waits for partners are not compute", "remove_partner_waits", None),
    Rule("slow ranks keep their stage's work", "is_of_device", _never),
    Rule("waits that were not recorded", "infer_waits", None, is_of_reader=True),
    Rule("eager sends", "find_truncated", _none_of_last, is_of_reader=True),
    Rule("collectives with a root may be left", "is_one_sided", _none_of_first, is_of_reader=True),
    Rule("the faster level of a network", "_faster_levels", None, is_of_reader=True),
    Rule("a transfer that its call delayed", "is_delayed_in_call", None, is_of_reader=True),
    Rule("parts of a split backward", "is_deferred_part", _none_of_first, is_of_reader=True),
    Rule("experts are no common compute", "is_expert_piece", None, is_of_reader=True),
    Rule("steps as the device ran them", "align_steps_to_device", None, is_of_reader=True),
    Rule("steps as partners begin them", "align_steps_to_partners", None, is_of_reader=True),
)  # fmt: skip


def _modules() -> Iterator[Any]:
    root = Path(diagnose.__file__).parent
    for package in PACKAGES:
        for file in sorted((root / package.replace(".", "/")).glob("[a-z]*.py")):
            yield import_module(f"rankscope.analysis.{package}.{file.stem}")


MODULES = (analyze, *_modules())


@contextlib.contextmanager
def without(rule: Rule) -> Iterator[None]:
    """Replace a rule by its absence, in each module that has it."""
    with contextlib.ExitStack() as stack:
        if not rule.attribute:
            for name, detectors in (("FROM_RECORDS", FROM_RECORDS), ("FROM_REPLAY", FROM_REPLAY)):
                kept = tuple(each for each in detectors if each is not rule.absent)
                stack.enter_context(mock.patch.object(diagnose, name, kept))
            yield
            return
        if rule.attribute in THRESHOLDS.__slots__:
            changed = replace(THRESHOLDS, **{rule.attribute: rule.absent})
            for module in (*MODULES, diagnose):
                if hasattr(module, "THRESHOLDS"):
                    stack.enter_context(mock.patch.object(module, "THRESHOLDS", changed))
            yield
            return
        owners = [module for module in MODULES if hasattr(module, rule.attribute)]
        if not owners:
            raise ValueError(f"no module of the analysis has {rule.attribute}: see RULES")
        absent = ABSENT.get(rule.attribute, rule.absent)
        for module in owners:
            stack.enter_context(mock.patch.object(module, rule.attribute, absent))
        yield


ABSENT: dict[str, Callable[..., Any]] = {
    "are_usual": lambda level, **_: np.ones(len(level), dtype=np.bool_),
    "find_slow_together": lambda excess: np.zeros(excess.shape, dtype=np.bool_),
    "remove_partner_waits": lambda model, _: model.operations.duration_ns.copy(),
    "infer_waits": lambda *_: (np.zeros(0, np.int64),) * 3,
    "_faster_levels": lambda levels: np.full(len(levels), np.nan),
    # The readers of both formats have one of this name: the members are the last or the second.
    "is_delayed_in_call": lambda _, other, rows: np.zeros(
        len(other if isinstance(other, np.ndarray) else rows), dtype=np.bool_
    ),
    "is_expert_piece": lambda _, pieces, __: np.zeros(len(pieces.start), dtype=np.bool_),
    "_find_evaluation": lambda *_: np.zeros(0, np.int64),
    "align_steps_to_device": lambda _, steps: steps,
    "align_steps_to_partners": lambda _, steps: steps,
}
"""Absent rules that return something else than their first argument."""


class Prepared:
    """A run that was read and replayed once."""

    def __init__(self, source: SpanSource, run_id: str) -> None:
        self._source, self._run_id = source, run_id
        run = source.run_info(run_id)
        spans, steps = source.spans(run_id), source.steps(run_id)
        record = Record(
            run=run,
            steps=cast("Any", analyze).align_steps(spans, steps),
            spans=spans,
            context=source.context(run_id),
        )
        self._reading, replay = analyze._read_replayable(record, lambda: spans, lambda _: None)
        self._replayer = None if replay is None else replay[0]
        self._record = record
        self._prices: dict[Any, tuple[Finding, ...]] = {}

    def read_again(self) -> Prepared:
        """Return the run as the readers read it now."""
        return Prepared(self._source, self._run_id)

    def findings(self, *, is_price_known: bool = True) -> tuple[Finding, ...]:
        """Return the findings with the rules as they are now."""
        if not is_price_known:
            self._prices = {}
        unpriced = diagnose.findings_of_record(self._record)
        if self._replayer is None:
            return unpriced
        case = analyze._build_case(self._record, self._reading, self._replayer)
        with mock.patch.object(diagnose, "price_candidates", self._price):
            priced = analyze._diagnose(self._record.run, case, ())
        return diagnose.combine_findings(priced, unpriced)

    def _price(
        self,
        candidates: tuple[Candidate, ...],
        *arguments: Any,  # noqa: ANN401
    ) -> tuple[Finding, ...]:
        """Price equal candidates once."""
        key = tuple(
            (
                *(each.cause.name, each.ranks, each.steps, each.shown_steps, each.excess_ratio),
                None if each.part is None else each.part.tobytes(),
                None if each.fixed_ns is None else each.fixed_ns.tobytes(),
            )
            for each in candidates
        )
        if key not in self._prices:
            self._prices[key] = price_candidates(candidates, *arguments)
        return self._prices[key]


def _look(findings: tuple[Finding, ...]) -> list[Any]:
    """Return what a reader sees of findings; prices that differ by less than 5 % are equal."""
    steps = 0.05
    return [
        (
            each.cause,
            each.ranks,
            each.steps,
            each.severity,
            None if each.recoverable_ratio is None else round(each.recoverable_ratio / steps),
        )
        for each in findings
    ]


def _row(findings: tuple[Finding, ...]) -> list[dict[str, Any]]:
    return [{"cause": each.cause, "ranks": each.ranks, "steps": each.steps} for each in findings]


SPECIAL = Path(__file__).with_name("special_jobs.txt").read_text().splitlines()
"""Jobs for rules whose case random ones seldom have: ``name: setting=value ... | fault ...``."""

Judge = tuple[Prepared, "Callable[[tuple[Finding, ...]], Any]"]
"""A run, and what is compared of its findings: their number of errors, or themselves."""


def in_memory(source: SpanSource, run_id: str) -> MemorySource:
    """Return a run that is read again after its store is closed."""
    return MemorySource(
        source.run_info(run_id), source.spans(run_id), source.steps(run_id), source.context(run_id)
    )


def labelled_run(labelled: Labelled) -> Judge | None:
    """Return a simulated run; None if it is large."""
    source = SimulatedSource(labelled.scenario)
    if len(source.spans("simulated")) > MOST_SPANS:
        return None
    truth = [
        {"cause": label.cause, "ranks": label.ranks, "visible_ranks": label.visible_ranks}
        for label in source.labels
    ]
    row = {"strength": labelled.strength, "truth": truth}
    return (
        Prepared(source, "simulated"),
        lambda found: wrongs_of_scenario({**row, "findings": _row(found)}),
    )


def special_run(number: int) -> Judge | None:
    """Return a job of `SPECIAL`."""
    settings, _, faults = SPECIAL[number].partition(": ")[2].partition("|")
    given: dict[str, Any] = {"num_steps": 14, "seed": number}
    noise: dict[str, Any] = {}
    for key, _, value in (each.partition("=") for each in settings.split()):
        of, name = (noise, key[6:]) if key.startswith("noise.") else (given, key)
        of[name] = SETTINGS.get(name, float if of is noise else int)(value)
    scenario = Scenario(
        **given, noise=Noise(**noise), faults=parse_simulated_faults(faults.split())
    )
    return labelled_run(
        Labelled(number=number, size="", scenario=scenario, strength=2.0, is_healthy=not faults)
    )


SETTINGS: dict[str, Callable[[str], Any]] = {
    "schedule": Schedule, "sends": Sends, "tp_detail": TpDetail, "launch_gap_ns": int,
}  # fmt: skip
"""Types of settings that are neither a number of things nor a share."""


def eager_run(number: int) -> Judge:
    """Return a run of the independent generator whose sends do not wait for receives."""
    case = case_by_number(number)
    return _independent(replace(case, job=replace(case.job, eager_sends=True)))


def independent_run(number: int) -> Judge:
    """Return a run of the independent generator."""
    return _independent(case_by_number(number))


def _independent(case: Case) -> Judge:
    running, ranks = lay_out(case.job, case.faults)
    options = SpoolOptions(
        run_id=f"case-{case.number}", clocks=clocks_of(case.job, off_ns=case.clock_off_ns)
    )
    with tempfile.TemporaryDirectory() as folder:
        write_spool(Path(folder), running, ranks, options)
        error_ns = None if case.clock_error_ns is None else 2 * case.clock_error_ns
        samples = samples_of(case, step_bounds(running, ranks))
        source = read_spool(Path(folder) / options.run_id, clock_error_ns=error_ns, samples=samples)
    faults = [{"cause": each.cause, "ranks": each.ranks} for each in case.faults]
    return (
        Prepared(source, options.run_id),
        lambda found: len(wrongs_of({"faults": faults, "findings": _row(found)})),
    )


def published_trace(file: Path) -> Judge:
    """Return a published trace."""
    name = file.stem.removeprefix("trace-")
    with tempfile.TemporaryDirectory() as folder, open_store(f"chdb://{folder}/s") as store:
        import_bytedance(store, file, run_id=name, meta=file.with_name(f"meta-{name}.yaml"))
        source = in_memory(StoreSource(store), name)
    return Prepared(source, name), lambda found: [(each.cause, each.ranks) for each in found]


def real_run(folder: Path) -> Judge | None:
    """Return a recorded run of a script; None if the job failed."""
    if (folder / "status").read_text() != "0":
        return None
    name, _, rest = folder.name.partition("-")
    fault = rest.rpartition("-")[0]
    with (
        tempfile.TemporaryDirectory() as store_folder,
        open_store(f"chdb://{store_folder}/s") as store,
    ):
        read_finished(folder / "spool", StoreWriter(store), run_id=None, show=_ignore)
        source = in_memory(StoreSource(store), folder.name)

    def wrongs(found: tuple[Finding, ...]) -> int:
        """Return the number of wrong alarms, and 1 if the fault is not among them."""
        alarms = [each for each in found if each.cause not in NO_ALARM]
        if fault == HEALTHY:
            return len(alarms)
        right, culprit = right_causes(JOBS[name], fault), culprit_of(JOBS[name], fault)
        fits = [each.cause in right and each.ranks == (culprit,) for each in alarms]
        return fits.count(False) + (not any(fits))

    return Prepared(source, folder.name), wrongs


def _ignore(_: str) -> None: ...


MAKERS: dict[str, Callable[[Any], Judge | None]] = {  # by the name of a set
    "traces": published_trace,
    "labelled": labelled_run,
    "independent": independent_run,
    "eager": eager_run,
    "special": special_run,
    "real": real_run,
}


def ablate(task: tuple[str, Any], words: Sequence[str] = ()) -> dict[str, Any]:
    """Return what becomes worse, better and other without each rule in one run.

    Args:
        task: A set and one of its runs.
        words: Parts of the names of the rules to ablate; empty: all.
    """
    kind, subject = task
    found = MAKERS[kind](subject)
    name = str(getattr(subject, "number", getattr(subject, "name", subject)))
    row: dict[str, Any] = {"set": kind, "run": name, "right": None}
    row |= {word: [] for word in OUTCOMES}
    if found is None:
        return row
    prepared, judge = found
    usual = prepared.findings()
    row["right"] = not judge(usual)
    for rule in RULES:
        if words and not any(word in rule.name for word in words):
            continue
        with without(rule):
            changed = prepared.read_again() if rule.is_of_reader else prepared
            now = changed.findings(is_price_known=not rule.is_of_price)
        if rule.is_of_price:
            prepared.findings(is_price_known=False)
        if judge(now) != judge(usual):
            is_better = kind != "traces" and judge(now) < judge(usual)
            row["better" if is_better else "worse"].append(rule.name)
        elif _look(now) != _look(usual):
            row["other"].append(rule.name)
    return row


OUTCOMES = ("worse", "better", "other")


def main() -> None:
    """Ablate, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=71)
    parser.add_argument("--share", type=float, default=0.04, help="of the small scenarios")
    parser.add_argument("--first", type=int, default=7000)
    parser.add_argument("--num", type=int, default=32, help="independent runs")
    parser.add_argument("--real", type=Path, help="folder of benchmarks.real_scripts")
    parser.add_argument("--sets", nargs="*", default=tuple(MAKERS), choices=MAKERS)
    parser.add_argument("--rules", nargs="*", default=(), help="parts of their names; all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("ablation.jsonl"))
    parser.add_argument("--summary", type=Path, help="print the table of an earlier run")
    options = parser.parse_args()
    if options.summary is None:
        numbers = range(options.first, options.first + options.num)
        of_set: dict[str, Iterable[Any]] = {
            "traces": sorted(TRACES.glob("trace-*.parquet")),
            "labelled": scenarios(options.seed, share=options.share, sizes=("small",)),
            "independent": numbers,
            "eager": numbers,
            "special": range(len(SPECIAL)),
            "real": [file.parent for file in sorted(options.real.glob("*/status"))]
            if options.real
            else (),
        }
        tasks = [(name, each) for name in options.sets for each in of_set[name]]
        with options.out.open("w") as out, ProcessPoolExecutor(options.jobs) as pool:
            for future in as_completed(
                [pool.submit(ablate, task, options.rules) for task in tasks]
            ):
                out.write(json.dumps(future.result()) + "\n")
                out.flush()
    lines = (options.summary or options.out).read_text().splitlines()
    sys.stdout.write(_table([json.loads(line) for line in lines]) + "\n")


def _table(rows: list[dict[str, Any]]) -> str:
    rows = [row for row in rows if row["right"] is not None]
    of_set = {name: [row for row in rows if row["set"] == name] for name in MAKERS}
    head = [f"{name} ({len(of_set[name])} runs)" for name in MAKERS]
    lines = [f"| without | {' | '.join(head)} |", f"| {' | '.join(['---'] * (len(head) + 1))} |"]
    lines.append(
        f"| nothing | - | {' | '.join(_num_right(of_set[name]) for name in list(MAKERS)[1:])} |"
    )
    for rule in RULES:
        cells = []
        for own in of_set.values():
            counts = (
                (sum(rule.name in row.get(word, ()) for row in own), word) for word in OUTCOMES
            )
            cells.append(", ".join(f"{num} {word}" for num, word in counts if num) or "-")
        lines.append(f"| {rule.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _num_right(rows: list[dict[str, Any]]) -> str:
    return f"{sum(row['right'] for row in rows)} right"


if __name__ == "__main__":
    main()

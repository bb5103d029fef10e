"""Checks by DCGM: its health watches, and its short diagnostic."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..result import Outcome, error, healthy, not_applicable, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..host import Host

OVERALL = re.compile(r"Overall Health\W+(?:value\W+)?(\w+)")
DIAGNOSTIC = ("dcgmi", "diag", "-r", "1", "-j")
ROW = re.compile(r"^\|(?P<name>[^|]+)\|(?P<text>[^|]+)\|\s*$")
STATUS = re.compile(r"^(pass|fail|warn|skip)", re.IGNORECASE)
PASS, FAIL, WARN = "pass", "fail", "warn"
ENTITY = r"(?:GPU(?P<gpu>\d+)|[A-Z]\w*)"
VERDICT = re.compile(
    rf"^(?:{ENTITY}: )?(?P<status>Pass|Fail|Warn|Skip)(?: - (?:GPUs?: (?P<gpus>[\d, ]+)|All))?$"
)
"""A verdict in the table: of all, of some GPUs (DCGM 3), or of one (DCGM 4)."""

NOTE = re.compile(rf"^(?P<kind>Warning|Info|Error)(?:: {ENTITY})?$")
MARGIN = "  "
"""Spaces behind the longest text of a row. Source: DCGM, ``dcgmi/Diag.cpp``."""

REMEDIES = {
    "persistence mode": "nvidia-smi -pm 1, or start nvidia-persistenced",
    "page retirement/row remap": "reset the GPU; if it stays, replace it",
    "environment variables": "unset the variables that it names",
    "graphics processes": "end them",
    "pcie": "reseat the GPU; see gpu-pcie",
    "inforom": "flash the firmware, or replace the GPU",
}
"""What to do by the name of the test, in small letters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosticResult:
    """Result of one test of the diagnostic, of one or several GPUs."""

    name: str
    gpus: str
    """Numbers of the GPUs; "" for the host."""

    status: str
    """``pass``, ``fail``, ``warn`` or ``skip``; another text as DCGM writes it."""

    text: str


def check_health(host: Host) -> Iterator[Outcome]:
    """Read the verdict of DCGM's health watches."""
    output = host.tool("dcgmi", "health", "-c")
    match = output and OVERALL.search(output.text)
    if not match or output is None:
        yield not_applicable("dcgmi is not installed, or its watches are off (dcgmi health -s a)")
        return
    verdict = match[1]
    lines = [" ".join(line.replace("|", " ").split()) for line in output.text.splitlines()]
    detail = "; ".join(line for line in lines if re.search(r"GPU \d|Warning|Failure|Error", line))
    if verdict.lower() == "healthy":
        yield healthy("DCGM: healthy")
    else:
        make = warning if verdict.lower() == "warning" else error
        yield make(f"DCGM: {verdict}: {detail[:300]}", "see dcgmi health -c and dcgmi diag -r 3")


def check_diagnostic(host: Host) -> Iterator[Outcome]:
    """Run the short diagnostic, which takes too long for a job's prolog, or read a recorded one."""
    if not (host.is_recorded or host.is_idle):
        yield not_applicable("run with --active only: it takes longer than the other checks")
        return
    output = host.first_tool(DIAGNOSTIC, DIAGNOSTIC[:-1])
    if output is None:
        yield not_applicable("dcgmi is not installed")
        return
    results, problem = parse_diagnostic(output.text)
    ran = [result for result in results if result.status in {"pass", "fail", "warn"}]
    outcomes = [outcome for result in ran for outcome in _judge(result)]
    if problem:
        outcomes.append(warning(f"the diagnostic failed: {problem[:200]}", "start nv-hostengine"))
    if not ran and not problem:
        yield not_applicable("the diagnostic of DCGM has no result")
        return
    yield from outcomes or [healthy(f"{len(ran)} tests of DCGM passed")]


def _judge(result: DiagnosticResult) -> Iterator[Outcome]:
    if result.status == "pass":
        return
    make = error if result.status == "fail" else warning
    text = f"{result.name}: {result.text or result.status}"
    remedy = REMEDIES.get(result.name.lower(), "see dcgmi diag -r 3")
    yield make(text[:300], remedy, part=f"GPU {result.gpus}" if result.gpus else "")


def parse_diagnostic(text: str) -> tuple[list[DiagnosticResult], str]:
    """Return the results in the output of `dcgmi diag`, and why it did not run.

    Source: DCGM 2 to 4: JSON with `DCGM GPU Diagnostic` or `DCGM Diagnostic`, or its table.
    """
    start = text.find("{")
    try:
        document = json.JSONDecoder().raw_decode(text[start:])[0] if start >= 0 else None
    except ValueError:
        document = None
    if not isinstance(document, dict):
        results = [*_table(text)]
        found = re.search(r"^(?:Error|.*Unable to).*$", text, re.MULTILINE)
        return results, "" if results or found is None else found[0]
    top = next((value for name, value in document.items() if "Diagnostic" in name), document)
    if not isinstance(top, dict):
        return [], str(top)
    results = [
        result
        for category in _list(top.get("test_categories"))
        for test in _list(category.get("tests"))
        for entry in _list(test.get("results"))
        for result in [_result(str(test.get("name", "")), entry)]
    ]
    return results, str(top.get("runtime_error") or document.get("runtime_error") or "")


def _list(value: object) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _result(name: str, entry: dict[str, Any]) -> DiagnosticResult:
    gpus = entry.get("gpu_ids", entry.get("gpu_id", entry.get("entity_id", "")))
    notes = entry.get("warnings") or entry.get("info") or []
    texts = [
        str(note.get("warning", note.get("info", ""))) if isinstance(note, dict) else str(note)
        for note in (notes if isinstance(notes, list) else [notes])
    ]
    return DiagnosticResult(
        name=name, gpus=str(gpus), status=_status(str(entry.get("status", ""))),
        text="; ".join(filter(None, texts)),
    )  # fmt: skip


def _status(text: str) -> str:
    match = STATUS.match(text.strip())
    return text if match is None else match[1].lower()


@dataclass(slots=True)
class _TableTest:
    """A test of the table, whose rows are read one after the other."""

    name: str
    verdicts: list[tuple[str, str]]
    """Status and GPUs; DCGM 4 has a row without GPUs, which counts, before those of the GPUs."""

    notes: list[tuple[str, str, str]]
    """Kind, GPU if the row names one, and text."""

    def results(self) -> Iterator[DiagnosticResult]:
        """Yield a result for each verdict."""
        (status, gpus), *others = self.verdicts
        verdicts = self.verdicts
        if not gpus:  # DCGM 4 writes "Fail" for a GPU with a warning, too
            bad = [(each, gpu) for each, gpu in others if each in {FAIL, WARN}]
            verdicts = [(WARN if status == WARN else each, gpu) for each, gpu in bad]
        for each, gpu in verdicts or [(status, gpus)]:
            notes = [note for note in self.notes if note[1] in {"", gpu} and each != PASS]
            kinds = {kind for kind, *_ in notes} - {"Info"} or {"Info"}
            texts = [" ".join(text.split()) for kind, _, text in notes if kind in kinds]
            yield DiagnosticResult(name=self.name, gpus=gpu, status=each, text="; ".join(texts))


def _table(text: str) -> Iterator[DiagnosticResult]:
    """Yield the results of the table: rows without a name go on with those above."""
    test: _TableTest | None = None
    for line in text.splitlines():
        row = ROW.match(line)
        if row is None:
            continue
        name, value = row["name"].strip(" -+"), row["text"].strip()
        verdict, note = VERDICT.match(value), NOTE.match(name)
        if name and verdict is not None and note is None:
            if test is not None:
                yield from test.results()
            test = _TableTest(name, [], [])
        if test is None:
            continue
        if verdict is not None and note is None:
            gpus = (verdict["gpus"] or verdict["gpu"] or "").strip()
            test.verdicts.append((_status(verdict["status"]), gpus))
        elif note is not None:
            test.notes.append((note["kind"], note["gpu"] or "", row["text"][1:]))
        elif not name and test.notes:
            # A text is cut after so many characters, also within a word.
            kind, gpu, begun = test.notes[-1]
            test.notes[-1] = (kind, gpu, begun.removesuffix(MARGIN) + row["text"][1:])
    if test is not None:
        yield from test.results()

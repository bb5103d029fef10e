"""Settings that differ between the ranks of a run, or from the previous run."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..report.report import Finding
from ..report.text import format_count, format_ranks
from ..statistics.thresholds import THRESHOLDS
from .detector import Cause, ProofForm

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ..trace.context import RankManifest, RunContext
    from ..trace.tables import EpochInfo, RunInfo
    from .detector import Record


MAX_SETTINGS_NAMED = 3

MAX_CHARACTERS = 40

PREVIOUS_RUN_PREFIXES = (
    "environment.NCCL_",
    "environment.CUDA_",
    "environment.TORCH_",
    "versions.",
)
"""Settings that are compared with the previous run: they may change speed unnoticed."""

PROCESS_SETTINGS = frozenset(
    {
        "boot_id", "cuda_visible_devices", "device", "device_id", "group_rank", "host",
        "hostname", "hosts", "local_rank", "master_port", "nccl_comm_id", "nccl_hostid",
        "node_rank", "pid", "pod", "port", "process_uuid", "rank", "seed", "started_ns", "time",
        "timestamp", "uuid",
    }
)  # fmt: skip
"""Last part, in lower case, of the name of a setting that belongs to one process."""

PROCESS_SETTING_PARTS = ("seeds.", "coords.", "hosts.", "device.uuid")

PROCESS_SETTING_ENDINGS = ("_file", "_dir", "_path", "_port")

PART_SETTINGS = frozenset({"model.num_parameters"})
"""Settings that describe the part of the model that a rank holds: equal for equal parts only."""

POSITIONAL_PREFIXES = ("config.", "model.", "layout.")
"""Settings that the job itself may choose by position in the layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A setting that is not the same on all ranks."""

    name: str
    usual: str | None
    """Most frequent value; None: most ranks do not set it."""

    other: str | None
    """Value on the ranks that differ; the most frequent one if they disagree."""

    num_values: int


CAUSE = Cause(
    name="misconfiguration",
    one="is configured differently from the other ranks",
    several="are configured differently from the other ranks",
    sentence="The configuration differs from the previous run",
    has_place=True,
    proof_form=ProofForm.SETTINGS,
)


def detect(record: Record) -> tuple[Finding, ...]:
    """Return the settings that differ."""
    return find_misconfigurations(record.run, record.context)


def find_misconfigurations(run: RunInfo, context: RunContext) -> tuple[Finding, ...]:
    """Find ranks whose settings differ from the others', one finding for each set of ranks.

    A setting that a rank's manifest lacks counts as unset. If more than half of the ranks agree,
    the others are named; if no value has a majority, all ranks are. Left out are settings that
    belong to one process (host, pid, ranks, seeds, paths: `PROCESS_SETTINGS`), settings that
    differ on every rank, and settings that follow the local rank or, in the job's own
    configuration, a position in the layout. The size of a rank's part of the model is compared
    among ranks of equal part, and not at all if the layout is unknown. Only the environment and
    the versions are compared with the previous run.

    The confidence is not calibrated: the share of ranks that agree, `undecided_certainty`
    without a majority, `previous_confidence` for a change since the previous run.
    """
    differences_of: dict[tuple[int, ...], dict[str, Difference]] = defaultdict(dict)
    shares: dict[tuple[int, ...], float] = {}
    for epoch in run.epochs:
        manifests = (state for state in context.manifests if state.epoch == epoch.epoch)
        settings = {manifest.rank: manifest.settings for manifest in manifests}
        for ranks, difference, share in _disagreements(epoch, settings, has_layout=run.has_layout):
            differences_of[ranks].setdefault(difference.name, difference)
            shares[ranks] = min(share, shares.get(ranks, 1.0))
    findings = _since_previous(context)
    for ranks, differences in differences_of.items():
        share = shares[ranks]
        has_majority = share > THRESHOLDS.majority_share
        settings_text = _list(
            tuple(differences.values()),
            "here",
            "on most others" if has_majority else "on some others",
        )
        if has_majority:
            verb = "is" if len(ranks) == 1 else "are"
            who = f"{format_ranks(ranks)} of {run.world_size:,} {verb}"
            text = f"{who} configured differently from the others: {settings_text}"
        else:
            text = f"the {len(ranks):,} ranks disagree: {settings_text}"
            text += "; no value has a majority, so all are named"
        findings.append(
            Finding(
                cause=CAUSE.name,
                ranks=ranks,
                confidence=share if has_majority else THRESHOLDS.undecided_certainty,
                evidence=text,
            )
        )
    return tuple(sorted(findings, key=lambda finding: (-finding.confidence, finding.ranks)))


def belongs_to_one_process(name: str) -> bool:
    """Return whether a setting belongs to one process, so that it differs between ranks."""
    last = name.rpartition(".")[2].lower()
    return (
        last in PROCESS_SETTINGS
        or last.endswith(PROCESS_SETTING_ENDINGS)
        or name.startswith(PROCESS_SETTING_PARTS)
    )


def _disagreements(
    epoch: EpochInfo, settings_of: Mapping[int, Mapping[str, str]], *, has_layout: bool
) -> Iterable[tuple[tuple[int, ...], Difference, float]]:
    """Yield (ranks that differ, the setting, share of ranks that agree)."""
    groups = _group_alike(settings_of)
    if len(groups) == 1:
        return
    positions = {
        info.rank: {"local_rank": info.local_rank, **info.coords.to_dict()} for info in epoch.ranks
    }
    part_of = {info.rank: (info.coords.pp, info.coords.tp, info.coords.ep) for info in epoch.ranks}
    for name in sorted({name for settings, _ in groups for name in settings}):
        if belongs_to_one_process(name) or (name in PART_SETTINGS and not has_layout):
            continue
        by_value: dict[str | None, list[int]] = defaultdict(list)
        for settings, ranks in groups:
            by_value[settings.get(name)] += ranks
        if len(by_value) == 1 or _follows_position(name, by_value, positions):
            continue
        pairs = {(part_of.get(rank), value) for value, ranks in by_value.items() for rank in ranks}
        if name in PART_SETTINGS and len(pairs) == len({part for part, _ in pairs}):
            continue
        sizes = Counter({value: len(ranks) for value, ranks in by_value.items()})
        (usual, num_usual), (other, _) = sizes.most_common(2)
        has_majority = num_usual > THRESHOLDS.majority_share * sizes.total()
        named = {value for value in by_value if not (has_majority and value == usual)}
        differing = tuple(sorted(rank for value in named for rank in by_value[value]))
        difference = Difference(name=name, usual=usual, other=other, num_values=len(by_value))
        yield differing, difference, num_usual / sizes.total()


def _group_alike(
    settings_of: Mapping[int, Mapping[str, str]],
) -> list[tuple[Mapping[str, str], list[int]]]:
    """Return each distinct manifest with its ranks. Ranks often share one object."""
    by_object: dict[int, tuple[Mapping[str, str], list[int]]] = {}
    for rank, settings in settings_of.items():
        by_object.setdefault(id(settings), (settings, []))[1].append(rank)
    by_content: dict[frozenset[tuple[str, str]], tuple[Mapping[str, str], list[int]]] = {}
    for settings, ranks in by_object.values():
        by_content.setdefault(frozenset(settings.items()), (settings, []))[1].extend(ranks)
    return list(by_content.values()) or [({}, [])]


def _follows_position(
    name: str, by_value: Mapping[str | None, Sequence[int]], positions: Mapping[int, dict[str, int]]
) -> bool:
    """Return whether a setting has its own value on each rank, or for each position on one axis.

    An axis counts only if it has fewer positions than there are ranks.
    """
    value_of = {rank: value for value, group in by_value.items() for rank in group}
    num = len(value_of)
    if len(by_value) == num >= THRESHOLDS.min_peers:
        return True
    if not value_of.keys() <= positions.keys():
        return False
    axes = ["local_rank"]
    if name.startswith(POSITIONAL_PREFIXES):
        axes += ["dp", "tp", "pp", "cp", "ep"]
    for axis in axes:
        places = {positions[rank][axis] for rank in value_of}
        pairs = {(positions[rank][axis], value) for rank, value in value_of.items()}
        if len(pairs) == len(places) < num:
            return len(places) == len(by_value)
    return False


def _since_previous(context: RunContext) -> list[Finding]:
    """Return what changed since the previous run, by the value that most ranks of each have."""
    if not context.manifests or not context.previous_manifests:
        return []
    newest = max(manifest.epoch for manifest in context.manifests)
    last = max(manifest.epoch for manifest in context.previous_manifests)
    now = common_settings([manifest for manifest in context.manifests if manifest.epoch == newest])
    before = common_settings(
        [manifest for manifest in context.previous_manifests if manifest.epoch == last]
    )
    changed = tuple(
        Difference(name=name, usual=before.get(name), other=now.get(name), num_values=2)
        for name in sorted(now.keys() | before.keys())
        if name.startswith(PREVIOUS_RUN_PREFIXES)
        and not belongs_to_one_process(name)
        and now.get(name) != before.get(name)
    )
    if not changed:
        return []
    ranks = tuple(
        sorted(manifest.rank for manifest in context.manifests if manifest.epoch == newest)
    )
    evidence = (
        f"{format_count(len(changed), 'setting')} changed since the previous run of this model and"
        f" world size, on most of {format_count(len(ranks), 'rank')}: "
    )
    evidence += _list(changed, "now", "before")
    return [
        Finding(
            cause=CAUSE.name,
            ranks=ranks,
            confidence=THRESHOLDS.previous_confidence,
            evidence=evidence,
        )
    ]


def common_settings(manifests: Sequence[RankManifest]) -> dict[str, str]:
    """Return the settings that have one value on more than half of the ranks."""
    counts: Counter[tuple[str, str]] = Counter()
    for settings, ranks in _group_alike(
        {manifest.rank: manifest.settings for manifest in manifests}
    ):
        for item in settings.items():
            counts[item] += len(ranks)
    least = THRESHOLDS.majority_share * len(manifests)
    return {name: value for (name, value), num in counts.items() if num > least}


def _list(differences: tuple[Difference, ...], here: str, there: str) -> str:
    parts = [
        f"{setting.name} is {_shown(setting.other)} {here} and {_shown(setting.usual)} {there}"
        for setting in differences[:MAX_SETTINGS_NAMED]
    ]
    more = len(differences) - MAX_SETTINGS_NAMED
    if more > 0:
        parts.append(f"{format_count(more, 'more setting')}")
    return ", ".join(parts)


def _shown(value: str | None) -> str:
    if value is None:
        return "unset"
    return f'"{value if len(value) <= MAX_CHARACTERS else value[: MAX_CHARACTERS - 3] + "..."}"'

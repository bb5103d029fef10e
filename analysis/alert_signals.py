"""Alert rules over what the store knows beyond diagnoses: of a live run, and of hosts."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from .alert_rules import (
    ANALYSIS_BEHIND,
    BAD_HOST,
    COLLECTOR_BEHIND,
    LOSS,
    RDMA_TRAFFIC,
    SILENT_RANK,
    AlertRules,
    Condition,
    apply_settings,
)
from .breakdown.drops import ROBUST
from .report.report import Severity
from .report.text import (
    format_count,
    format_names,
    format_percent,
    format_ranks,
    format_seconds,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from .report.liveness import RankLiveness

HOLD_S = 60.0
"""Time for which a state must be gone before its alert is over. Source: choice, a minute, as alerts
are repeated."""

LOSS_STEPS = 20
"""Steps of the loss's baseline. Source: choice."""

SETTLED_STEPS = 5
"""Steps in which the same number of ranks must have reported a loss, before one that reports none
is news: many scripts read the loss every ten steps only. Source: choice."""

NUM_NEW_BUCKETS = 3
"""Newest buckets of traffic, all of which must differ."""

MIN_OLD_BUCKETS = 6
"""Earlier buckets that a host's baseline needs. Source: choice, a minute."""

MIN_TRAFFIC_HOSTS = 3
"""Hosts of a run of which one can be said to differ. Source: `min_peers`, less
one: the median of three is that of the others."""

STOPPED_RATIO = 0.05
"""Share of its baseline below which a host's traffic has stopped: keep-alives remain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoss:
    """The loss of one step."""

    step: int
    mean: float | None
    """Over the ranks with a finite one; None if none has."""

    num_ranks: int
    num_bad: int
    """Ranks whose loss is infinite or no number; also those that report none, in stores of before
    migration 15."""

    num_infinite: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """RDMA traffic of the hosts of a run over time."""

    hosts: tuple[str, ...]
    bytes_per_s: NDArray[np.float64]
    """Shape (hosts, buckets): sent, in buckets of equal length, the newest last; NaN if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSignals:
    """State of a live run in the store, beyond its diagnosis."""

    run: str
    liveness: RankLiveness | None = None
    losses: Sequence[StepLoss] = ()
    """Ascending, complete steps only."""

    traffic: Traffic | None = None
    collector_lag_s: float | None = None
    """Time since the newest stored step, while the ranks have gone on; None if they have not."""

    analysis_lag_s: float | None = None
    """Time since the end of the oldest complete step that was not analysed; None if there is
    none."""


MAX_ERRORS = 3
"""Errors of a host that its alert writes out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecord:
    """Errors of a host's checks, and the findings that name it."""

    host: str
    errors: Sequence[str] = ()
    """Of its newest examination, a sentence each."""

    named_by: Mapping[str, Sequence[str]]
    """Causes of the findings that name it by run, in the order in which they opened."""

    is_fit_since: bool = False
    """Whether a later run on it ended without such a finding, or it was taken back since."""


def find_host_conditions(
    records: Iterable[HostRecord], *, rules: AlertRules | None = None
) -> tuple[Condition, ...]:
    """Return the hosts to alert about: by errors of their checks, and as repeat offenders."""
    rules = rules or AlertRules()
    conditions: list[Condition] = []
    for record in records:
        if record.errors:
            more = len(record.errors) - MAX_ERRORS
            shown = "; ".join(record.errors[:MAX_ERRORS]) + (
                f"; and {more} more" if more > 0 else ""
            )
            conditions.append(
                Condition(
                    rule=BAD_HOST,
                    key=record.host,
                    severity=Severity.CRITICAL,
                    text=f"the checks of host {record.host} report errors: {shown}",
                    hosts=(record.host,),
                    hold_s=HOLD_S,
                )
            )
        if len(record.named_by) >= rules.bad_host.num_runs and not record.is_fit_since:
            causes = sorted({cause for causes in record.named_by.values() for cause in causes})
            conditions.append(
                Condition(
                    rule=BAD_HOST,
                    key=f"{record.host} findings",
                    severity=Severity.WARNING,
                    text=(
                        f"findings of {format_count(len(record.named_by), 'run')} name host"
                        f" {record.host}: {format_names(causes)} in"
                        f" {format_names(tuple(record.named_by))}"
                    ),
                    hosts=(record.host,),
                    hold_s=HOLD_S,
                    numbers={"num_runs": float(len(record.named_by))},
                )
            )
    return apply_settings(conditions, rules)


def find_signal_conditions(
    signals: RunSignals, *, rules: AlertRules | None = None
) -> tuple[Condition, ...]:
    """Return all that the signals of a run give reason to alert about."""
    rules = rules or AlertRules()
    conditions = [
        *_from_liveness(signals, rules),
        *_from_losses(signals, rules),
        *_from_traffic(signals, rules),
        *_from_lags(signals, rules),
    ]
    return apply_settings(conditions, rules)


def _from_liveness(signals: RunSignals, rules: AlertRules) -> Iterator[Condition]:
    live = signals.liveness
    if live is None or not live.is_uneven:
        return
    after_ns = rules.silent_rank.after_s * 1e9
    silent = [process for process in live.silent if process.age_ns > after_ns]
    if not silent:
        return
    longest_s = max(process.age_ns for process in silent) / 1e9
    ranks = tuple(sorted(process.rank for process in silent))
    yield Condition(
        rule=SILENT_RANK,
        key=str(silent[0].rank),  # the longest silence: others may follow it
        severity=Severity.CRITICAL,
        text=(
            f"{signals.run}: {live.num_silent:,} of {live.num_ranks:,} ranks sent no heartbeat for"
            f" {format_seconds(longest_s)}: {format_ranks(ranks)}"
        ),
        ranks=ranks,
        hosts=tuple(sorted({process.host for process in silent})),
        hold_s=HOLD_S,
    )


def _from_losses(signals: RunSignals, rules: AlertRules) -> Iterator[Condition]:
    losses = signals.losses
    for index, now in enumerate(losses):
        before = losses[max(index - SETTLED_STEPS, 0) : index]
        is_settled = len(before) == SETTLED_STEPS and len({loss.num_bad for loss in before}) == 1
        usual_bad = before[-1].num_bad if is_settled else now.num_ranks
        if now.num_infinite or (now.num_bad > usual_bad and now.num_bad <= now.num_ranks):
            num = max(now.num_infinite, now.num_bad - usual_bad)
            yield Condition(
                rule=LOSS,
                key=f"nan-{now.step}",
                severity=Severity.CRITICAL,
                steps=(now.step, losses[-1].step),
                is_active=losses[-1].num_bad > usual_bad or losses[-1].num_infinite > 0,
                text=(
                    f"{signals.run}: the loss of {num:,} of {now.num_ranks:,} ranks is no number"
                    f" since step {now.step}"
                ),
            )
            return
    yield from _loss_spikes(signals, rules)


def _loss_spikes(signals: RunSignals, rules: AlertRules) -> Iterator[Condition]:
    """Yield the newest jump of the mean loss, compared with the steps before it."""
    means = [(loss.step, loss.mean) for loss in signals.losses if loss.mean is not None]
    settings = rules.loss
    begin = LOSS_STEPS
    while begin + settings.num_steps <= len(means):
        base = [value for _, value in means[begin - LOSS_STEPS : begin]]
        usual = median(base)
        deviation = ROBUST * median(abs(value - usual) for value in base)
        limit = usual + max(settings.ratio * abs(usual), settings.deviations * deviation)
        end = begin
        while end < len(means) and means[end][1] > limit:
            end += 1
        if end - begin >= settings.num_steps:
            step, value = means[begin]
            yield Condition(
                rule=LOSS,
                key=f"spike-{step}",
                severity=Severity.WARNING,
                steps=(step, means[end - 1][0]),
                is_active=end == len(means),
                text=(
                    f"{signals.run}: the loss jumped from {usual:.3g} to {value:.3g} in step {step}"
                ),
                numbers={"loss": value, "median": usual},
            )
            begin = end + LOSS_STEPS
        else:
            begin += 1


def _from_traffic(signals: RunSignals, rules: AlertRules) -> Iterator[Condition]:
    """Yield hosts whose RDMA traffic stops or changes while that of the other hosts does not.

    Each host is compared with its own baseline, and that change with the median change of all
    hosts: in a checkpoint the traffic of all of them stops.

    Source:
        arXiv 2402.15627, section 4: RDMA traffic is periodic; what deviates is a sign of trouble.
    """
    traffic = signals.traffic
    if traffic is None or len(traffic.hosts) < MIN_TRAFFIC_HOSTS:
        return
    rate = traffic.bytes_per_s
    old, new = rate[:, :-NUM_NEW_BUCKETS], rate[:, -NUM_NEW_BUCKETS:]
    is_known = (np.isfinite(old).sum(axis=1) >= MIN_OLD_BUCKETS) & np.isfinite(new).all(axis=1)
    if is_known.sum() < MIN_TRAFFIC_HOSTS:
        return
    usual = np.nanmedian(old[is_known], axis=1)
    change = new[is_known] / np.where(usual > 0, usual, np.nan)[:, None]
    of_all = np.nanmedian(change, axis=0)
    if not (np.isfinite(of_all) & (of_all > 1 - rules.rdma_traffic.ratio)).all():
        return  # all hosts pause: a checkpoint, an evaluation, or the job hangs, which is a finding
    hosts = np.array(traffic.hosts)[is_known]
    ratio = change / of_all
    limit = rules.rdma_traffic.ratio
    for row in np.flatnonzero((ratio < 1 - limit).all(axis=1) | (ratio > 1 + limit).all(axis=1)):
        share = float(np.median(change[row]))
        what = (
            "has stopped"
            if share < STOPPED_RATIO
            else f"is {format_percent(share)} of what it was, that of the other hosts"
            f" {format_percent(float(np.median(of_all)))}"
        )
        yield Condition(
            rule=RDMA_TRAFFIC,
            key=str(hosts[row]),
            severity=Severity.WARNING,
            text=f"{signals.run}: the RDMA traffic of host {hosts[row]} {what}",
            hosts=(str(hosts[row]),),
            hold_s=HOLD_S,
        )


def _from_lags(signals: RunSignals, rules: AlertRules) -> Iterator[Condition]:
    collector_lag, analysis_lag = signals.collector_lag_s, signals.analysis_lag_s
    for rule, lag_s, after_s, text in (
        (
            COLLECTOR_BEHIND,
            collector_lag,
            rules.collector_behind.after_s,
            "the newest stored step ended {} ago, though the ranks go on",
        ),
        (
            ANALYSIS_BEHIND,
            analysis_lag,
            rules.analysis_behind.after_s,
            "a step has waited for its analysis for {}",
        ),
    ):
        if lag_s is not None and lag_s > after_s:
            yield Condition(
                rule=rule,
                key="0",
                severity=Severity.WARNING,
                text=f"{signals.run}: {text.format(format_seconds(lag_s))}",
                hold_s=HOLD_S,
                numbers={"lag_s": lag_s},
            )

"""Host checks beside findings: confirmed, not confirmed, not examined."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.report.report import Finding, HostNote
from rankscope.collector.read.host_checks import TABLE, StoredCheck, check_row
from rankscope.collector.store.store import open_store
from rankscope.doctor.confirmation import (
    confirm_findings,
    confirmation_document,
    format_confirmations,
)
from rankscope.doctor.stored import compare_values

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow

BEGIN_NS = 1_800_000_000 * 10**9
STEP_NS = 10**9
BRAKE = StoredCheck(
    host="gpu07", at_ns=BEGIN_NS + 20 * STEP_NS, occasion="finding", section="GPUs",
    name="gpu-throttle", part="GPU 5", device="aaaa-5", state="error",
    reason="power brake (now 1,350 of 1,980 MHz)",
)  # fmt: skip
SWAP = replace(
    BRAKE, section="system", name="swap", part="", device="", state="warning", reason="swap is used"
)
HEALTHY = replace(BRAKE, name="gpu-ecc", part="", device="", state="healthy", reason="none")
SLOW = Finding(cause="slow-compute", ranks=(5,), steps=(10, 19), confidence=0.9, evidence="slow")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"chdb://{tmp_path}/store") as opened:
        opened.insert_rows(
            "ranks",
            [
                {"run_id": "job", "epoch": 0, "rank": rank,
                 "host": "gpu07" if rank < 8 else "gpu08", "device_uuid": f"GPU-AAAA-{rank % 8}"}
                for rank in range(16)
            ],
        )  # fmt: skip
        opened.insert_rows(
            "steps",
            [
                {"run_id": "job", "epoch": 0, "step": step, "rank": 0,
                 "start_ns": BEGIN_NS + step * STEP_NS, "end_ns": BEGIN_NS + (step + 1) * STEP_NS}
                for step in range(20)
            ],
        )  # fmt: skip
        yield opened


def text_of(store: Store, finding: Finding, *checks: StoredCheck) -> str:
    store.insert_rows(TABLE, [check_row(check) for check in checks])
    (confirmations,) = confirm_findings(store, "job", [finding])
    return format_confirmations(confirmations)


def test_the_own_gpu_of_a_rank_confirms(store: Store) -> None:
    text = text_of(store, SLOW, BRAKE, HEALTHY)

    assert text == "confirmed: gpu07, GPU 5: power brake (now 1,350 of 1,980 MHz)"
    ((confirmation,),) = confirm_findings(store, "job", [SLOW])
    (document,) = confirmation_document([confirmation])
    assert (document["is_confirmed"], document["num_healthy"]) == (True, 1)


def test_another_gpu_of_the_host_does_not_confirm(store: Store) -> None:
    text = text_of(store, replace(SLOW, ranks=(3,)), BRAKE, HEALTHY)

    assert text == (
        "gpu07: not confirmed by host checks (1 healthy, 0 not applicable); it has other problems:"
        " GPU 5: power brake (now 1,350 of 1,980 MHz)"
    )


def test_an_old_message_of_the_kernel_does_not_confirm(store: Store) -> None:
    xid = replace(
        BRAKE, section="system", name="kernel-log", part="earlier", device="", state="warning",
        reason="Xid 79, 9 h ago",
    )  # fmt: skip

    assert text_of(store, SLOW, xid).startswith("gpu07: not confirmed by host checks")
    assert text_of(store, SLOW, replace(xid, part="")).startswith("confirmed: gpu07, kernel-log")


def test_a_cause_is_confirmed_by_its_own_checks_only(store: Store) -> None:
    stall = replace(SLOW, cause="host-stall")

    assert text_of(store, stall, BRAKE, SWAP) == "confirmed: gpu07, swap: swap is used"


@pytest.mark.parametrize(
    ("name", "part", "error"),
    [
        ("limits", "nofile", "OSError: [Errno 24] Too many open files"),
        ("shared-memory", "", "DataLoader worker is killed by signal: Bus error"),
        ("disk-space", "/", "OSError: [Errno 28] No space left on device"),
    ],
)
def test_a_limit_confirms_only_an_end_that_reached_it(
    store: Store, name: str, part: str, error: str
) -> None:
    limit = replace(SWAP, name=name, part=part, reason="it is small")
    crash = replace(SLOW, cause="crash", evidence="rank 5 failed (ValueError: shape)")

    assert text_of(store, crash, limit).startswith("gpu07: not confirmed by host checks")
    assert text_of(store, replace(crash, evidence=error)).startswith("confirmed: gpu07")
    said = replace(crash, host_notes=(HostNote(source="rank logs", text=error),))
    assert text_of(store, said).startswith("confirmed: gpu07")


def test_examinations_before_the_onset_or_of_other_hosts_do_not_count(store: Store) -> None:
    early = replace(BRAKE, at_ns=BEGIN_NS + 5 * STEP_NS)
    late = replace(BRAKE, at_ns=BEGIN_NS + 3600 * STEP_NS)

    assert text_of(store, SLOW, early, late, replace(BRAKE, host="gpu08")) == ""


def test_a_confirmation_stays_after_the_fault_has_gone(store: Store) -> None:
    later = replace(HEALTHY, at_ns=BRAKE.at_ns + STEP_NS)

    assert text_of(store, SLOW, BRAKE, later).startswith("confirmed: gpu07, GPU 5")


def test_hosts_that_were_not_examined_are_named_beside_others(store: Store) -> None:
    both = replace(SLOW, ranks=(5, 12))

    assert text_of(store, both, BRAKE) == (
        "confirmed: gpu07, GPU 5: power brake (now 1,350 of 1,980 MHz); gpu08 was not examined"
    )


def test_a_version_of_one_of_three_hosts_is_a_warning() -> None:
    versions = {"a": "550.90", "b": "550.90", "c": "550.54"}
    checks = [
        replace(HEALTHY, host=host, name="driver", value=value) for host, value in versions.items()
    ]

    (found,) = compare_values(checks)

    assert (found.host, found.state) == ("c", "warning")
    assert found.reason == "550.54 here, and 550.90 on 2 of 3 hosts"
    assert compare_values(checks[1:]) == []

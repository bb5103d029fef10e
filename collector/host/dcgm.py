"""Samples of NVIDIA GPUs from the Prometheus page of a DCGM exporter, read with limits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from ..errors import CollectorError
from ..http_client import request_once
from .gpu import IDLE_REASON, plain_uuid
from .sample import Sample, SourceAbsentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.samples import Sample as PageSample

MAX_BODY_BYTES = 4 << 20
MAX_LINES = 50_000
MAX_LINE_BYTES = 4096
TIMEOUT_S = 1.0
HTTP_OK = 200
METRIC_PREFIX = b"DCGM_"

MEBIBYTE = float(1 << 20)
REASONS = "gpu-throttle-reasons"

NAMES = {
    "DCGM_FI_DEV_SM_CLOCK": ("gpu-clock-hz", 1e6),
    "DCGM_FI_DEV_MEM_CLOCK": ("gpu-memory-clock-hz", 1e6),
    "DCGM_FI_DEV_POWER_USAGE": ("gpu-power-w", 1.0),
    "DCGM_FI_DEV_POWER_MGMT_LIMIT": ("gpu-power-limit-w", 1.0),
    "DCGM_FI_DEV_GPU_TEMP": ("gpu-temperature-c", 1.0),
    "DCGM_FI_DEV_GPU_UTIL": ("gpu-utilisation-ratio", 0.01),
    "DCGM_FI_DEV_FB_USED": ("gpu-memory-used-bytes", MEBIBYTE),
    "DCGM_FI_DEV_FB_TOTAL": ("gpu-memory-total-bytes", MEBIBYTE),
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": (REASONS, 1.0),
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": (REASONS, 1.0),
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": ("gpu-ecc-corrected-errors", 1.0),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": ("gpu-ecc-uncorrected-errors", 1.0),
    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": ("gpu-nvlink-crc-flit-errors", 1.0),
    "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": ("gpu-nvlink-crc-data-errors", 1.0),
    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": ("gpu-nvlink-replay-errors", 1.0),
    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": ("gpu-nvlink-recovery-errors", 1.0),
}
"""Metric -> (our name, factor from the metric's unit to ours).
Source: ``default-counters.csv`` of NVIDIA's dcgm-exporter: MHz, W, C, %, MiB."""

BLANKS = (
    range(0x7FFF_FFF0, 0x8000_0000),
    range(1 << 47, (1 << 47) + 16),
    range(0x7FFF_FFFF_FFFF_FFF0, (1 << 63) + 1),
)
"""Values of DCGM that mean unknown. Source: ``dcgm_structs.h``, ``DCGM_*_BLANK``."""

PART_OF_A_GPU = "GPU_I_ID"
MAX_DIGITS = 4
MAX_REASONS = 1 << 53
"""Bound of a valid mask of reasons. Numbers beyond 2^53 are not exact, so bits would be random."""


class DcgmError(CollectorError):
    """The exporter's URL is invalid, it answered with an error, or its page exceeds the limits."""


class DcgmSource:
    """GPUs of this host as a DCGM exporter reports them, with the names of `GpuSource`.

    Args:
        url: URL of the exporter's page (``http://127.0.0.1:9400/metrics``). Redirects are not
            followed.
        local_rank_of: Returns the local rank of each device by `plain_uuid`, as for `GpuSource`.
        timeout_s: Time for one reading, from connecting to the last byte.

    Raises:
        DcgmError: The URL is not http or https.
    """

    name = "dcgm"

    def __init__(
        self,
        url: str,
        *,
        local_rank_of: Callable[[], Mapping[str, int]] = dict,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise DcgmError(
                f"invalid URL of a DCGM exporter {url!r}: give one as http://host:9400/metrics"
            )
        self._parts = parts
        self._local_rank_of = local_rank_of
        self._timeout_s = timeout_s

    def read(self, at_ns: int) -> list[Sample]:
        """Return the samples of whole devices (no MIG parts).

        Raises:
            DcgmError: The exporter answered with an error, or its page exceeds the limits.
            SourceAbsentError: No exporter answers at the URL.
        """
        try:
            body = self._fetch()
        except OSError as error:
            raise SourceAbsentError(
                f"no DCGM exporter at {self._parts.netloc} ({error}): no GPU samples"
            ) from error
        local_ranks = self._local_rank_of()
        return [
            Sample(at_ns, name, value, device)
            for name, value, device in _readings(body, local_ranks)
        ]

    def _fetch(self) -> bytes:
        parts = self._parts
        answer = request_once(
            "GET",
            f"{parts.scheme}://{parts.netloc}{parts.path or '/metrics'}",
            timeout_s=self._timeout_s,
            headers={"user-agent": "rankscope"},
            max_answer_bytes=MAX_BODY_BYTES,
        )
        if answer.status != HTTP_OK:
            raise DcgmError(f"{parts.netloc} answered {answer.status}: no GPU samples")
        if not answer.is_whole:
            raise DcgmError(
                f"the page of {parts.netloc} is over {MAX_BODY_BYTES} bytes: no GPU samples"
            )
        return answer.body


def _known_samples(body: bytes) -> Iterator[PageSample]:
    """Yield the samples of the metrics in `NAMES`; other and invalid lines are skipped.

    Each line is parsed alone: one that is invalid costs no other, and without its ``# TYPE`` the
    parser leaves the name of a counter as it is.

    Raises:
        DcgmError: More than `MAX_LINES` lines.
    """
    lines = body.split(b"\n", MAX_LINES)
    if len(lines) > MAX_LINES:
        raise DcgmError(f"the page has over {MAX_LINES} lines: no GPU samples")
    for line in lines:
        if not line.startswith(METRIC_PREFIX) or len(line) > MAX_LINE_BYTES:
            continue
        try:
            for family in text_string_to_metric_families(line.decode("utf-8", "replace")):
                for found in family.samples:
                    if found.name in NAMES:
                        yield found._replace(value=float(found.value))
        except (ValueError, LookupError, OverflowError):
            continue


def _readings(body: bytes, local_ranks: Mapping[str, int]) -> Iterator[tuple[str, float, int]]:
    """Yield (name, value, device) of whole devices, without unknown values."""
    for found in _known_samples(body):
        if found.labels.get(PART_OF_A_GPU) or not _is_known(found.value):
            continue
        device = _device(found.labels, local_ranks)
        if device is None:
            continue
        name, scale = NAMES[found.name]
        if name == REASONS:
            if 0 <= found.value < MAX_REASONS and found.value.is_integer():
                yield name, float(int(found.value) & ~IDLE_REASON), device
        else:
            yield name, found.value * scale, device


def _is_known(value: float) -> bool:
    return math.isfinite(value) and not any(blank.start <= value < blank.stop for blank in BLANKS)


def _device(labels: Mapping[str, str], local_ranks: Mapping[str, int]) -> int | None:
    if local_ranks:
        return local_ranks.get(plain_uuid(labels.get("UUID", "")))
    index = labels.get("gpu", "")
    return int(index) if index.isascii() and index.isdigit() and len(index) <= MAX_DIGITS else None

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.host.dcgm import MAX_BODY_BYTES, MAX_LINES, DcgmError, DcgmSource
from rankscope.collector.host.sample import Sample, SourceAbsentError
from tests.support.collector.talking_server import speaking, trickle

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 60.0
LABELS = 'gpu="1",UUID="GPU-AAAA",device="nvidia1",modelName="NVIDIA H200",Hostname="a"'
PAGE = f"""\
# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{{{LABELS}}} 1755
DCGM_FI_DEV_POWER_USAGE{{{LABELS}}} 612.25
DCGM_FI_DEV_FB_USED{{{LABELS}}} 1024
DCGM_FI_DEV_GPU_UTIL{{{LABELS}}} 50
DCGM_FI_DEV_CLOCK_THROTTLE_REASONS{{{LABELS}}} 65
DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{LABELS}}} 9223372036854775794
DCGM_FI_DEV_GPU_TEMP{{{LABELS}}} 2147483632
DCGM_FI_DEV_MEM_CLOCK{{{LABELS}}} NaN
DCGM_FI_DEV_SM_CLOCK{{{LABELS},GPU_I_ID="3"}} 1000
DCGM_FI_DEV_DEC_UTIL{{{LABELS}}} 1
""".encode()


@contextmanager
def exporter(page: bytes, *, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("location", "/elsewhere")
            self.end_headers()
            try:
                self.wfile.write(page)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


def test_an_exporter_that_answers_byte_by_byte_is_absent_after_the_timeout() -> None:
    with speaking(trickle(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1000)) as port:
        source = DcgmSource(f"http://127.0.0.1:{port}/metrics", timeout_s=2.0)
        begun_s = time.monotonic()
        with pytest.raises(SourceAbsentError, match="timed out"):
            source.read(0)

    assert time.monotonic() - begun_s < 30  # the page would never end


def test_a_page_becomes_samples_in_our_units() -> None:
    with exporter(PAGE) as url:
        found = DcgmSource(url, timeout_s=TIMEOUT_S).read(7)

    # THEN: blanks, NaN, parts of a device and unknown metrics are left out; the idle bit is masked
    assert found == [
        Sample(7, "gpu-clock-hz", 1.755e9, 1),
        Sample(7, "gpu-power-w", 612.25, 1),
        Sample(7, "gpu-memory-used-bytes", 2.0**30, 1),
        Sample(7, "gpu-utilisation-ratio", 0.5, 1),
        Sample(7, "gpu-throttle-reasons", 64.0, 1),
    ]


def test_samples_have_the_local_rank_as_device() -> None:
    with exporter(PAGE) as url:
        ours = DcgmSource(url, local_rank_of=lambda: {"aaaa": 6}, timeout_s=TIMEOUT_S).read(7)
        others = DcgmSource(url, local_rank_of=lambda: {"bbbb": 6}, timeout_s=TIMEOUT_S).read(7)

    assert {sample.device for sample in ours} == {6}
    assert others == []


@pytest.mark.parametrize(
    ("line", "device"),
    [
        (b'DCGM_FI_DEV_GPU_TEMP{gpu="2"} 40', 2),
        (b'DCGM_FI_DEV_GPU_TEMP{gpu="2"} 40 1700000000000', 2),
        (rb'DCGM_FI_DEV_GPU_TEMP{modelName="a\"} 1\n\\",gpu="3",} 4e1', 3),
    ],
)
def test_lines_may_have_a_time_and_escaped_labels(line: bytes, device: int) -> None:
    with exporter(line) as url:
        found = DcgmSource(url, timeout_s=TIMEOUT_S).read(7)

    assert found == [Sample(7, "gpu-temperature-c", 40.0, device)]


@pytest.mark.parametrize("kind", [b"counter", b"gauge"])
def test_the_type_of_a_metric_does_not_change_its_name(kind: bytes) -> None:
    name = b"DCGM_FI_DEV_ECC_SBE_VOL_TOTAL"
    with exporter(b"# TYPE " + name + b" " + kind + b"\n" + name + b'{gpu="0"} 3\n') as url:
        found = DcgmSource(url, timeout_s=TIMEOUT_S).read(7)

    assert found == [Sample(7, "gpu-ecc-corrected-errors", 3.0, 0)]


@pytest.mark.parametrize(
    "line",
    [
        b"", b"DCGM_FI_DEV_GPU_TEMP", b"DCGM_FI_DEV_GPU_TEMP one", b"DCGM_FI_DEV_GPU_TEMP{b} 1",
        b'DCGM_FI_DEV_GPU_TEMP{gpu="0" 1', b"DCGM_\xff 1", b"DCGM_" + b"a" * 5000,
        b"DCGM_FI_DEV_GPU_TEMP " + b"9" * 400,
    ],
)  # fmt: skip
def test_an_invalid_line_costs_no_other(line: bytes) -> None:
    with exporter(line + b'\nDCGM_FI_DEV_GPU_TEMP{gpu="0"} 40\n') as url:
        found = DcgmSource(url, timeout_s=TIMEOUT_S).read(7)

    assert found == [Sample(7, "gpu-temperature-c", 40.0, 0)]


@pytest.mark.parametrize("mask", [b"-1", b"1.5", b"1e300", b"NaN"])
def test_an_invalid_mask_of_reasons_is_left_out(mask: bytes) -> None:
    page = b'DCGM_FI_DEV_CLOCK_THROTTLE_REASONS{gpu="0"} ' + mask + b"\n"
    with exporter(page) as url:
        assert DcgmSource(url, timeout_s=TIMEOUT_S).read(7) == []


def test_a_page_of_too_many_lines_is_refused() -> None:
    with exporter(b"\n" * (MAX_LINES + 1)) as url, pytest.raises(DcgmError, match="lines"):
        DcgmSource(url, timeout_s=TIMEOUT_S).read(0)


def test_a_page_that_is_too_large_is_refused() -> None:
    with exporter(b"#" * (MAX_BODY_BYTES + 1)) as url, pytest.raises(DcgmError, match="is over"):
        DcgmSource(url, timeout_s=TIMEOUT_S).read(0)


@pytest.mark.parametrize("status", [302, 404, 500])
def test_an_answer_with_an_error_status_is_refused(status: int) -> None:
    with (
        exporter(b"", status=status) as url,
        pytest.raises(DcgmError, match=f"answered {status}"),
    ):
        DcgmSource(url, timeout_s=TIMEOUT_S).read(0)


def test_a_missing_exporter_is_absent() -> None:
    with exporter(b"") as url:
        pass
    with pytest.raises(SourceAbsentError, match="no DCGM exporter at 127"):
        DcgmSource(url).read(0)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://a/b", "metrics", "http://"])
def test_a_url_that_is_not_http_is_refused(url: str) -> None:
    with pytest.raises(DcgmError, match="give one as"):
        DcgmSource(url)

"""The behaviour of the fake device, on a real one. Skipped without a GPU (conftest)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

from rankscope.tracer.device.backend import MarkPool
from rankscope.tracer.device.clock import DeviceClock
from rankscope.tracer.device.cuda import CudaBackend
from rankscope.tracer.span import SpanFlag
from rankscope.tracer.spool import DropReason
from tests.support.paths import ROOT
from tests.support.tracer.reading import dropped, process_folders, read_spans
from tests.support.tracer.recording import run_script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ON_DEVICE = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN

TRAIN = """
    import torch
    from rankscope import tracer
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 2048)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tracer.install(model=model)
    tracer.begin_steps()
    for _ in range(5):
        model(torch.ones(4096, 2048, device="cuda")).square().mean().backward()
        optimizer.step()
        tracer.step()
    torch.cuda.synchronize()
"""


def test_a_training_step_is_timed_on_the_device(tmp_path: Path) -> None:
    done = run_script(TRAIN, tmp_path)

    assert (done.returncode, done.stderr) == (0, "")
    folder = process_folders(tmp_path)[0]
    rows = [row for row in read_spans(folder) if row.track == "cuda:0 stream 0"]
    assert [row.name for row in rows] == 5 * ["forward", "backward", "optimizer"]
    assert {row.flags for row in rows} == {ON_DEVICE}
    assert all(row.duration_ns > 0 for row in rows)
    assert dropped(folder) == {}


def test_compute_waits_by_an_event_for_a_call_on_another_stream(tmp_path: Path) -> None:
    """As in FSDP: the call stalls only its own stream."""
    script = """
        import tempfile, torch, torch.distributed as dist
        from rankscope import tracer
        from torch import nn
        store = f"file://{tempfile.mkdtemp()}/store"
        dist.init_process_group("nccl", init_method=store, rank=0, world_size=1)
        gather, buffer = torch.cuda.Stream(), torch.ones(1 << 20, device="cuda")

        class Sharded(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(2048, 2048)
            def forward(self, x):
                compute = torch.cuda.current_stream()
                gather.wait_stream(compute)
                with torch.cuda.stream(gather):
                    torch.cuda._sleep(50_000_000)
                    dist.all_reduce(buffer)
                compute.wait_stream(gather)
                return self.linear(x)

        model = Sharded().cuda()
        dist.all_reduce(buffer)  # makes the communicator, which takes longer than the sleep
        model(torch.ones(1024, 2048, device="cuda"))
        torch.cuda.synchronize()
        tracer.install(model=model)
        tracer.begin_steps()
        for _ in range(3):
            model(torch.ones(1024, 2048, device="cuda")).sum().backward()
            tracer.step()
        torch.cuda.synchronize()
        tracer.shutdown()
        dist.destroy_process_group()
    """
    done = run_script(script, tmp_path)

    assert done.returncode == 0, done.stderr
    folder = process_folders(tmp_path)[0]
    rows = read_spans(folder)
    waits = [row for row in rows if row.kind == "wait"]
    calls = [row for row in rows if row.name == "all_reduce"]
    assert [(row.track, row.depth) for row in waits] == 3 * [("cuda:0 stream 0", 1)]
    assert {row.flags for row in calls} == {ON_DEVICE | SpanFlag.ASYNC}
    assert all(row.duration_ns > 5_000_000 for row in waits)
    for wait, call in zip(waits, calls, strict=True):
        assert wait.end_ns == pytest.approx(call.end_ns, abs=1_000_000)
    assert dropped(folder) == {}


def test_an_assert_on_the_device_reaches_the_job_unchanged(tmp_path: Path) -> None:
    script = """
        import torch, sys
        if len(sys.argv) > 1:
            from rankscope import tracer
            tracer.install()
        table = torch.zeros(4, device="cuda")
        (table[torch.tensor([9], device="cuda")] + 1).cpu()
    """
    ends = []
    for arguments in ([], ["traced"]):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), *arguments],
            cwd=ROOT,
            env={**os.environ, "RANKSCOPE_TRACE": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        ends.append((done.returncode, done.stderr.strip().splitlines()[-1]))

    assert ends[0] == ends[1]


def test_a_capture_in_another_thread_survives_the_resolver() -> None:
    backend = CudaBackend()
    event = backend.new_event()
    event.record(torch.cuda.current_stream())
    failures: list[Exception] = []
    stop = threading.Event()

    def query() -> None:
        try:
            backend.prepare_thread(0)
            while not stop.is_set():
                event.query()
        except RuntimeError as problem:
            failures.append(problem)

    thread = threading.Thread(target=query)
    thread.start()
    data, graph = torch.ones(1024, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(1_000):
            data.add_(1)
    stop.set()
    thread.join()
    graph.replay()

    assert failures == []
    assert data[0].item() == 1_001


def test_nothing_is_recorded_into_a_cuda_graph(tmp_path: Path) -> None:
    done = run_script(
        """
        import torch
        from rankscope import tracer
        from torch import nn
        model = nn.Linear(64, 64).cuda()
        data = torch.ones(8, 64, device="cuda")
        model(data)
        tracer.install(model=model)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            model(data)
        graph.replay()
        torch.cuda.synchronize()
        """,
        tmp_path,
    )

    assert (done.returncode, done.stderr) == (0, "")
    folder = process_folders(tmp_path)[0]
    assert dropped(folder) == {DropReason.CAPTURING: 1}


def test_device_times_are_within_the_bound_on_the_hosts_clock() -> None:
    backend = CudaBackend()
    clock = DeviceClock(MarkPool(backend.new_event, 0), backend.private_stream(0))
    until_s = time.monotonic() + 12
    while time.monotonic() < until_s:
        clock.renew_if_due()
        time.sleep(0.02)
    stream, errors_ns = torch.cuda.current_stream(), []
    for _ in range(100):
        event = backend.new_event()
        before_ns = time.monotonic_ns()
        event.record(stream)
        while not event.query():
            pass
        after_ns = time.monotonic_ns()
        mapped = clock.read_time(event, before_ns)

        assert before_ns - mapped.error_ns <= mapped.at_ns <= after_ns + mapped.error_ns
        errors_ns.append(mapped.error_ns)
    assert max(errors_ns) < 50_000

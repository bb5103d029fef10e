"""A device that behaves like CUDA for device timing.

Streams work in order and concurrently. Events are done later, on the device's own clock.
``elapsed_time`` is a float32 in ms. An asynchronous error is sticky. A query may invalidate a graph
capture of another thread. With one connection, streams wait for each other's launches. Time passes
only when a call or the test advances it.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

NEVER_NS = 1 << 62
CALL_NS = 1_000
LATENCY_NS = 4_000
"""Time from the host's call to the start on an idle device."""


class CudaError(RuntimeError):
    """The error that torch raises if CUDA fails."""


@dataclass
class FakeStream:
    cuda_stream: int
    device: int
    end_ns: int = 0
    """Host time at which all of its work is done."""

    capturing: bool = False

    @property
    def device_index(self) -> int:
        """As torch's streams call it."""
        return self.device


@dataclass
class FakeTensor:
    device: int


@dataclass
class FakeGraph:
    thread_id: int
    mode: str
    invalidated: bool = False


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.done_ns: int | None = None
        self.in_graph = False

    def record(self, stream: FakeStream) -> None:
        cuda = self._cuda
        cuda.call()
        self.in_graph = stream.capturing
        cuda.num_in_graph += stream.capturing
        self.done_ns = cuda.append(stream, 0)

    def wait(self, stream: FakeStream) -> None:
        self._cuda.call()
        stream.end_ns = max(stream.end_ns, self.done_ns or 0)

    def query(self) -> bool:
        self._cuda.num_queries += 1
        self._cuda.call()
        self._cuda.check_captures(self)
        return self._is_done()

    def elapsed_time(self, end_event: FakeEvent) -> float:
        if self.done_ns is None or end_event.done_ns is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end_event.query()):
            raise CudaError("Both events must be completed before calculating elapsed time.")
        device_ns = self._cuda.device_ns(end_event.done_ns) - self._cuda.device_ns(self.done_ns)
        (elapsed_ms,) = struct.unpack("f", struct.pack("f", device_ns / 1e6))
        return float(elapsed_ms)

    def _is_done(self) -> bool:
        return self.done_ns is None or self.done_ns <= self._cuda.now_ns


@dataclass
class FakeCuda:
    """A `DeviceBackend`."""

    comm_backend = "nccl"

    drift: float = 0.0
    """The host's clock runs ``1 + drift`` times as fast as the device's."""

    connections: int = 8
    now_ns: int = 1_000_000_000_000
    slow_call_ns: list[int] = field(default_factory=list)
    """Durations of the next calls beyond `CALL_NS`, such as a thread switch."""

    num_queries: int = 0
    num_in_graph: int = 0
    error: Exception | None = None
    graph: FakeGraph | None = None
    current: dict[int, FakeStream] = field(default_factory=dict)
    thread_devices: dict[int, int] = field(default_factory=dict)
    """Device for which a thread was prepared."""

    _relaxed: set[int] = field(default_factory=set)
    _head_ns: dict[int, int] = field(default_factory=dict)
    _streams: int = 0

    # -- time ----------------------------------------------------------------

    def clock(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    def device_ns(self, host_ns: int) -> float:
        return (host_ns - 1_000_000_000_000) / (1 + self.drift)

    # -- work ----------------------------------------------------------------

    def call(self) -> None:
        """Enter the library: this takes time, and raises an error that has occurred meanwhile."""
        self.now_ns += CALL_NS + (self.slow_call_ns.pop(0) if self.slow_call_ns else 0)
        if self.error is not None:
            raise self.error

    def append(self, stream: FakeStream, duration_ns: int) -> int:
        """Give the stream work; return when it will be done."""
        if stream.capturing:
            return NEVER_NS
        start_ns = max(self.now_ns + LATENCY_NS, stream.end_ns)
        if self.connections == 1:
            start_ns = max(start_ns, self._head_ns.get(stream.device, 0))
            self._head_ns[stream.device] = start_ns
        stream.end_ns = start_ns + duration_ns
        return stream.end_ns

    def kernel(self, duration_ns: int, stream: FakeStream | None = None) -> int:
        self.call()
        return self.append(stream or self.stream(0), duration_ns)

    def wait_for(self, stream: FakeStream, other: FakeStream) -> None:
        """Make a stream wait for all work that another has received."""
        self.call()
        stream.end_ns = max(stream.end_ns, other.end_ns)
        self.append(stream, 0)

    def new_stream(self, device: int = 0) -> FakeStream:
        self._streams += 1
        return FakeStream(0x7F00 + self._streams, device)

    def stream(self, device: int) -> FakeStream:
        return self.current.setdefault(device, FakeStream(0, device))

    # -- graphs --------------------------------------------------------------

    def begin_capture(self, stream: FakeStream, mode: str = "global") -> FakeGraph:
        """Capture in a separate thread, not the one that queries."""
        stream.capturing = True
        self.graph = FakeGraph(-1, mode)
        return self.graph

    def end_capture(self, stream: FakeStream) -> None:
        graph, self.graph = self.graph, None
        stream.capturing = False
        assert graph is not None
        if graph.invalidated:
            raise CudaError("operation failed due to a previous error during capture")

    def check_captures(self, event: FakeEvent) -> None:
        if event.in_graph:
            raise CudaError("operation not permitted on an event last recorded in a capture")
        graph = self.graph
        if graph is None or graph.mode != "global" or threading.get_ident() in self._relaxed:
            return
        graph.invalidated = True
        raise CudaError("operation not permitted when stream is capturing")

    # -- the backend ---------------------------------------------------------

    def device_of(self, objects: Iterable[object]) -> int | None:
        return next((one.device for one in objects if isinstance(one, FakeTensor)), None)

    def current_stream(self, device: int) -> FakeStream:
        return self.stream(device)

    def is_capturing(self, device: int) -> bool:
        return self.stream(device).capturing

    def private_stream(self, device: int) -> FakeStream:
        return self.new_stream(device)

    def new_event(self) -> FakeEvent:
        return FakeEvent(self)

    def prepare_thread(self, device: int) -> None:
        self.call()
        self.thread_devices[threading.get_ident()] = device
        self._relaxed.add(threading.get_ident())

    def device_uuid(self, device: int) -> str:
        return f"GPU-fake-{device}"

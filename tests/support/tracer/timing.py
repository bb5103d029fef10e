"""A recorder whose device is a fake, and whose turns a test makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.tracer.device.timing import DeviceTiming
from tests.support.tracer.recording import recorder_in

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.tracer.record.recorder import Recorder
    from tests.support.tracer.torch.fake_cuda import FakeCuda

TURN_NS = 20_000_000


class TimedRecorder:
    """A recorder with device timing, whose turns the test makes."""

    def __init__(self, folder: Path, cuda: FakeCuda, *, capacity: int = 1_000) -> None:
        self.cuda = cuda
        self.recorder: Recorder = recorder_in(folder)
        self.timing = DeviceTiming(
            self.recorder, cuda, capacity=capacity, clock=cuda.clock, sleep=cuda.sleep
        )
        self.recorder.device_timing = self.timing

    def turns(self, number: int = 1) -> None:
        for _ in range(number):
            self.cuda.now_ns += TURN_NS
            self.timing.turn()

    def shutdown(self, *, turns: int = 0) -> None:
        self.turns(turns)
        self.timing.close()
        self.recorder.shutdown()

"""The kernel's log, read as it grows: allow-listed messages become events of the host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .followed_file import FollowedFile
from .host_events import KERNEL, HostEvent
from .kernel_messages import read_message
from .sample import Sample, SourceAbsentError, read_vmstat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

KERNEL_LOG = Path("/dev/kmsg")

MAX_EVENTS = 100
"""Events of one reading; of a flood the first are kept and the others counted."""

LINES_NAME, GAPS_NAME = "kernel-log-lines", "kernel-log-gaps"
KILLS_NAME = "oom-killed-processes"


class KernelLogSource:
    """Allow-listed messages of the kernel since the start, and its count of out-of-memory kills.

    That count shows that the kernel ended a process where its log is not permitted, as in a
    container.

    Args:
        path: The kernel's log, or a file that syslog writes it to.
        local_rank_of_pci: Returns the local ranks of devices by their PCI address.
        local_rank_of_process: Returns the local ranks of processes, those that ranks started
            included.
        kills: Returns the kernel's count of out-of-memory kills; None if it is unknown.
    """

    name = "kernel-log"

    def __init__(
        self,
        sink: Callable[[Iterable[HostEvent]], None],
        *,
        path: Path = KERNEL_LOG,
        local_rank_of_pci: Callable[[], Mapping[str, int]] = dict,
        local_rank_of_process: Callable[[], Mapping[int, int]] = dict,
        kills: Callable[[], int | None] = lambda: read_vmstat("oom_kill"),
    ) -> None:
        self._sink = sink
        self._path = path
        self._local_rank_of_pci = local_rank_of_pci
        self._local_rank_of_process = local_rank_of_process
        self._kills = kills
        self._file = FollowedFile(path, from_end=True)
        self.problem: str | None = None
        """Why the log is not read; None if it is."""

        self.num_lines = 0
        self.num_floods = 0
        """Readings with more than `MAX_EVENTS` messages."""

    def read(self, at_ns: int) -> list[Sample]:
        """Send the new messages; return how many lines were read, and the count of kills.

        Raises:
            SourceAbsentError: Neither is readable.
        """
        samples = []
        try:
            lines = self._file.read_lines()
        except OSError as error:
            self.problem = f"{self._path} cannot be read ({error.strerror})"
            lines = []
        else:
            self.problem = None
            self.num_lines += len(lines)
            samples.append(Sample(at_ns, LINES_NAME, float(self.num_lines)))
        kills = self._kills()
        if kills is not None:
            samples.append(Sample(at_ns, KILLS_NAME, float(kills)))
        events = [event for line in lines if (event := self._event(line, at_ns)) is not None]
        self.num_floods += len(events) > MAX_EVENTS
        if gaps := self._file.num_gaps + self.num_floods:
            samples.append(Sample(at_ns, GAPS_NAME, float(gaps)))
        if events:
            self._sink(events[:MAX_EVENTS])
        if not samples:
            raise SourceAbsentError(f"{self.problem}: no messages of the kernel")
        return samples

    def _event(self, line: str, at_ns: int) -> HostEvent | None:
        """Return the event of a line, which is a record of ``/dev/kmsg`` or a line of syslog.

        Source: Linux, ``Documentation/ABI/testing/dev-kmsg``: "6,1234,5678,-;text".
        """
        if line.startswith(" "):
            return None  # a record's dictionary
        head, found, text = line.partition(";")
        is_record = found and head.split(",")[0].isdigit()
        message = read_message(text if is_record else line)
        if message is None:
            return None
        of_device = self._local_rank_of_pci().get(message.pci)
        return HostEvent(
            at_ns=at_ns,
            kind=KERNEL,
            text=message.text,
            pid=message.pid,
            local_rank=self._local_rank_of_process().get(message.pid or -1, of_device),
            data={
                "class": message.kind.value,
                "code": message.code,
                "remedy": message.remedy,
                "ends_process": message.ends_process,
                "pid": message.pid,
                "process": message.process,
                "pci": message.pci,
                "line": message.line,
            },
        )

"""TCP proxy with network faults, on the loopback and without root."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

CHUNK_BYTES = 16_384
LOOK_AGAIN_S = 0.01
TIMEOUT_S = 60.0
RETRANSMIT_S = 0.2
"""First pause before a lost packet is sent again, as in Linux; it doubles."""

MOST_LOSSES = 4
"""Attempts to send a packet before the connection is reset."""
RESET = struct.pack("ii", 1, 0)
"""`SO_LINGER` on with no time: closing sends RST and no FIN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Current faults of the network; none by default."""

    is_cut: bool = False
    """New connections are reset at once, old ones at their next byte."""

    is_blackholed: bool = False
    """Nothing is forwarded and nothing is closed, in both directions."""

    latency_s: float = 0.0
    """Delay of each chunk in each direction."""

    bytes_per_s: float | None = None
    """Bandwidth of one connection in each direction."""

    lost_ratio: float = 0.0
    """Share of lost packets: TCP sends them again after a pause, and later ones wait."""

    slice_bytes: int = CHUNK_BYTES
    """Largest chunk that is forwarded at once."""

    reset_after_request_bytes: int | None = None
    """Reset after the server got this many bytes of the connection."""

    reset_after_reply_bytes: int | None = None
    """Reset after the client got this many bytes of the answer; the server does not notice."""


@dataclass(slots=True)
class Traffic:
    """Forwarded traffic so far."""

    num_connections: int = 0
    num_losses: int = 0


@dataclass(slots=True, eq=False)
class _Pair:
    """The two sockets of one connection."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter | None = None
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, *, reset: bool) -> None:
        self.is_over.set()
        for writer in (self.client, self.server):
            if writer is None:
                continue
            sock: socket.socket | None = writer.get_extra_info("socket")
            if reset and sock is not None:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()


class FaultProxy:
    """Forwards a port of the loopback to another one with the given faults.

    Runs in its own thread. ``faults`` may be replaced at any time from any thread, and also affects
    open connections.

    Args:
        target_port: Port of the server on the loopback; may be changed later.
        chooser: Random generator of lost packets.
    """

    def __init__(self, target_port: int, *, chooser: random.Random | None = None) -> None:
        self._chooser = chooser or random.Random(0)
        self.target_port = target_port
        self.faults = Faults()
        self.traffic = Traffic()
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._pairs: set[_Pair] = set()
        self._stopping = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(TIMEOUT_S):
            raise RuntimeError("the fault proxy did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stopping.wait()
        server.close()
        self._end_all()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _end_all(self) -> None:
        for pair in list(self._pairs):
            pair.end(reset=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.traffic.num_connections += 1
        pair = _Pair(client=writer)
        self._pairs.add(pair)
        try:
            await self._wait_out_blackhole(pair)
            if self.faults.is_cut:
                pair.end(reset=True)
                return
            try:
                back, pair.server = await asyncio.open_connection("127.0.0.1", self.target_port)
            except OSError:
                pair.end(reset=True)
                return
            up = self._pump(pair, reader, pair.server, is_request=True)
            down = self._pump(pair, back, writer, is_request=False)
            await _first_of(up, down, pair.is_over.wait())
        finally:
            pair.end(reset=False)
            self._pairs.discard(pair)

    async def _pump(
        self,
        pair: _Pair,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        is_request: bool,
    ) -> None:
        num_passed = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(min(self.faults.slice_bytes, CHUNK_BYTES)):
                await self._wait_out_blackhole(pair)
                faults = self.faults
                if faults.is_cut:
                    pair.end(reset=True)
                    return
                if faults.latency_s:
                    await asyncio.sleep(faults.latency_s)
                if not await self._arrives(faults):
                    pair.end(reset=True)
                    return
                limit = (
                    faults.reset_after_request_bytes
                    if is_request
                    else faults.reset_after_reply_bytes
                )
                kept = data if limit is None else data[: max(limit - num_passed, 0)]
                writer.write(kept)
                await writer.drain()
                num_passed += len(kept)
                if limit is not None and num_passed >= limit:
                    pair.end(reset=True)
                    return
                if faults.bytes_per_s:
                    await asyncio.sleep(len(kept) / faults.bytes_per_s)

    async def _arrives(self, faults: Faults) -> bool:
        """Wait for the delivery of a packet that may be lost; False if it is given up."""
        pause_s = RETRANSMIT_S
        for _ in range(MOST_LOSSES):
            if self._chooser.random() >= faults.lost_ratio:
                return True
            self.traffic.num_losses += 1
            await asyncio.sleep(pause_s)
            pause_s *= 2
        return False

    async def _wait_out_blackhole(self, pair: _Pair) -> None:
        while self.faults.is_blackholed and not pair.is_over.is_set():
            await asyncio.sleep(LOOK_AGAIN_S)


async def _first_of(*works: Coroutine[Any, Any, object]) -> None:
    """Return when one of the tasks is done, and cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

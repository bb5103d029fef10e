from __future__ import annotations

import signal

import pytest

from rankscope.server.interrupts import terminated_like_interrupted


def test_sigterm_is_an_interrupt_inside_and_what_it_was_outside() -> None:
    before = signal.getsignal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt), terminated_like_interrupted():
        signal.raise_signal(signal.SIGTERM)

    assert signal.getsignal(signal.SIGTERM) == before

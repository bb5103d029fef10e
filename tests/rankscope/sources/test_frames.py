from __future__ import annotations

from rankscope.sources.frames import find_own_frame, read_frames

LIBRARY = "/env/lib/python3.12/site-packages/torch/cuda/__init__.py:1162 synchronize"


def test_the_own_frame_of_a_stack_is_the_innermost_outside_of_libraries() -> None:
    threads = [
        {"name": "MainThread", "frames": [LIBRARY, "train.py:70 main", "<frozen runpy>:88 _run"]},
        {"name": "loader", "frames": ["data.py:3 read"]},
    ]

    frames = read_frames("stack", {"threads": threads})

    assert frames == (LIBRARY, "train.py:70 main", "<frozen runpy>:88 _run")
    assert find_own_frame(frames) == "train.py:70 main"
    assert find_own_frame([LIBRARY]) == ""


def test_the_frames_of_an_exit_are_those_of_its_traceback() -> None:
    traceback = (
        "Traceback (most recent call last):\n"
        '  File "train.py", line 70, in main\n    loss.backward()\n'
        f'  File "{LIBRARY.partition(":")[0]}", line 1162, in synchronize\n'
        "RuntimeError: Timed out\n"
    )

    frames = read_frames("exit", {"exception": {"traceback": traceback}})

    assert frames == (LIBRARY, "train.py:70 main")


def test_malformed_events_have_no_frames() -> None:
    assert read_frames("stack", {"threads": [4]}) == ()
    assert read_frames("stack", {"threads": [{"frames": None}]}) == ()
    assert read_frames("exit", {"exception": None}) == ()
    assert read_frames("lost", {"step": 3}) == ()

"""Stacks of hung jobs in public issues; in what each is was derived manually from its frames."""

from __future__ import annotations

import re

import pytest

from rankscope.analysis.hosts.stacks import StackPlace, find_place, read_main_frames

PY_SPY = re.compile(r"(\S+) \((\S+?)(?:\.py)?:(\d+)\)")
FAULTHANDLER = re.compile(r'File "(?:.*/site-packages/)?(\S+)", line (\d+) in (\S+)')
LIBRARIES = (
    "torch",
    "deepspeed",
    "fsspec",
    "filelock",
    "huggingface_hub",
    "megatron",
    "accelerate",
)
STANDARD = ("threading", "queue", "selectors", "multiprocessing", "asyncio", "concurrent")

CASES: dict[str, tuple[str, StackPlace]] = {
    # A rank builds a model while another one holds the lock of a compilation: its own code.
    "deepspeedai/DeepSpeedExamples#302": (
        (
            "wait (torch/utils/file_baton.py:42); _jit_compile (torch/utils/cpp_extension.py:1522);"
            " load (torch/utils/cpp_extension.py:1284); initialize (deepspeed/__init__.py:156);"
            " main (main.py:273)"
        ),
        StackPlace.NEVER_JOINED,
    ),
    "RolnickLab/ami-data-companion#140": (
        (
            "wait (threading.py:359); get (queue.py:180);"
            " _try_get_data (torch/utils/data/dataloader.py:1310);"
            " _next_data (torch/utils/data/dataloader.py:1524); __next__"
            " (trapdata/antenna/datasets.py:478)"
        ),
        StackPlace.DATA_LOADER,
    ),
    # The workers do not end with the epoch.
    "pytorch/pytorch#39570": (
        (
            "poll (multiprocessing/popen_fork.py:28); wait (multiprocessing/popen_fork.py:48);"
            " join (multiprocessing/process.py:140); _shutdown_workers"
            " (torch/utils/data/dataloader.py:942);"
            " __next__ (torch/utils/data/dataloader.py:345); main (iterative_clustering.py:80)"
        ),
        StackPlace.DATA_LOADER,
    ),
    "lhotse-speech/lhotse#1146": (
        (
            "select (selectors.py:416); wait (multiprocessing/connection.py:931);"
            " poll (multiprocessing/connection.py:257); get (multiprocessing/queues.py:113);"
            " _try_get_data (torch/utils/data/dataloader.py:1120);"
            " train_one_epoch (train.py:939)"
        ),
        StackPlace.DATA_LOADER,
    ),
    # All GPUs are at 100 %: the stream waits for a collective that other ranks do not call.
    "deepspeedai/DeepSpeed#851": (
        (
            'File "torch/cuda/streams.py", line 95 in synchronize;'
            ' File "deepspeed/runtime/zero/stage3.py", line 490 in _synchronize_communication;'
            ' File "deepspeed/runtime/zero/stage3.py", line 406 in fetch_sub_module'
        ),
        StackPlace.DRIVER,
    ),
    "pangeo-forge/pangeo-forge-recipes#177": (
        (
            "wait (threading.py:306); wait (threading.py:558); sync (fsspec/asyn.py:59);"
            " store_chunk (recipes/xarray_zarr.py:120)"
        ),
        StackPlace.STORAGE,
    ),
    # A lock file on a shared file system whose holder is gone.
    "huggingface/huggingface_hub#2543": (
        (
            "acquire (filelock/_api.py:344); WeakFileLock (huggingface_hub/utils/_fixes.py:98);"
            " _hf_hub_download_to_cache_dir (huggingface_hub/file_download.py:1270); main"
            " (train.py:61)"
        ),
        StackPlace.STORAGE,
    ),
    # A checkpoint is planned with collectives, and in one of them this rank waits.
    "pytorch/torchtitan#168": (
        (
            'File "/envs/llm/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",'
            " line"
            ' 3230 in scatter; File "torch/distributed/c10d_logger.py", line 75 in wrapper;'
            ' File "torch/distributed/checkpoint/utils.py", line 130 in scatter_object;'
            ' File "torch/distributed/checkpoint/state_dict_saver.py", line 240 in _save_state_dict'
        ),
        StackPlace.COLLECTIVE,
    ),
    "pytorch/pytorch#54818": (
        (
            'File "torch/distributed/distributed_c10d.py", line 2477 in barrier;'
            ' File "torch/testing/_internal/distributed/rpc/rpc_test.py", line 838 in test_reinit'
        ),
        StackPlace.COLLECTIVE,
    ),
    # The innermost Python frame is an operator; that it waits in cudaStreamSynchronize is in C.
    "rwth-i6/returnn#1811": (
        (
            "ctc_loss (torch/nn/functional.py:3086); ctc_loss"
            " (returnn/torch/frontend/_backend.py:748);"
            " _run_step (returnn/torch/engine.py:932)"
        ),
        StackPlace.NEVER_JOINED,
    ),
}


def frames_of(text: str) -> list[str]:
    """Return the frames of a dump of py-spy or faulthandler as the tracer writes them."""
    found = [(path, line, name) for name, path, line in PY_SPY.findall(text)]
    found = found or FAULTHANDLER.findall(text)
    return [
        f"{_root(path)}/{path.removesuffix('.py')}.py:{line} {name}" for path, line, name in found
    ]


def _root(path: str) -> str:
    first = re.split(r"[/.]", path)[0]
    if first in LIBRARIES:
        return "/opt/venv/lib/python3.11/site-packages"
    return "/usr/lib/python3.11" if first in STANDARD else "/home/ml/job"


@pytest.mark.parametrize("issue", CASES)
def test_in_what_the_main_thread_of_a_hung_job_is(issue: str) -> None:
    text, place = CASES[issue]

    frames = frames_of(text)

    assert len(frames) == text.count(";") + 1
    assert find_place(frames) is place


BACKWARD = (
    "backward (torch/autograd/__init__.py:266); backward (torch/_tensor.py:522);"
    " backward (deepspeed/runtime/fp16/loss_scaler.py:63); training_loop"
    " (fine_tune_accelerate.py:410)"
)
MONITOR = "wait (threading.py:324); run (tqdm/_monitor.py:60); _bootstrap (threading.py:973)"
GATHER = (
    "all_gather_into_tensor (torch/distributed/distributed_c10d.py:2709);"
    " wrapper (torch/distributed/c10d_logger.py:72);"
    " all_gather_into_tensor (deepspeed/comm/torch.py:219)"
)
PARTITION = (
    "partition_grads (deepspeed/runtime/zero/stage3.py:1500);"
    " wrapped_fn (deepspeed/utils/nvtx.py:18)"
)


def threads(*texts: str) -> dict[str, object]:
    return {
        "threads": [{"name": str(at), "frames": frames_of(each)} for at, each in enumerate(texts)]
    }


def test_a_backward_is_where_the_thread_of_autograd_is() -> None:
    # Source: huggingface/accelerate#3104, one rank; deepspeedai/DeepSpeed#6524, another.
    gathering = read_main_frames(threads(BACKWARD, MONITOR, GATHER))
    partitioning = read_main_frames(threads(BACKWARD, MONITOR, PARTITION))
    alone = read_main_frames(threads(BACKWARD, MONITOR))

    assert find_place(gathering) is StackPlace.COLLECTIVE
    assert find_place(partitioning) is StackPlace.NEVER_JOINED
    assert partitioning[0].endswith("stage3.py:1500 partition_grads")
    assert alone[0].endswith("autograd/__init__.py:266 backward")


def test_other_threads_say_nothing_of_a_main_thread_in_its_own_code() -> None:
    (main,) = read_main_frames(threads("main (train.py:70)", GATHER))

    assert main == "/home/ml/job/train.py:70 main"


@pytest.mark.parametrize(
    ("call", "place"),
    [
        ("openat /mnt/data/shard-17.tar", StackPlace.STORAGE),
        ("read /mnt/data/shard-17.tar", StackPlace.STORAGE),
        ("openat shard-17.tar", StackPlace.STORAGE),
        ("page fault", StackPlace.STORAGE),
        ("ioctl /dev/nvidia0", StackPlace.DRIVER),
        ("read socket:[4711]", StackPlace.NEVER_JOINED),
        ("read pipe:[4711]", StackPlace.NEVER_JOINED),
        ("read", StackPlace.NEVER_JOINED),
        ("write /dev/null", StackPlace.NEVER_JOINED),
        ("", StackPlace.NEVER_JOINED),
    ],
)
def test_the_file_of_a_system_call_says_in_what_a_rank_is(call: str, place: StackPlace) -> None:
    own = ["/home/ml/job/data.py:64 load"]

    assert find_place(own, call) is place
    assert find_place(frames_of(GATHER), call) is StackPlace.COLLECTIVE


def test_an_operator_of_a_sharded_tensor_computes() -> None:
    frames = frames_of(
        "dispatch (torch/distributed/tensor/_dispatch.py:154); forward"
        " (torch/nn/modules/linear.py:125)"
    )

    assert find_place(frames) is StackPlace.NEVER_JOINED

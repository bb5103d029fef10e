"""Secrets in a manifest, and what the environment declares for MFU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from rankscope.tracer.job.manifest import VARIABLES, hide_secrets, read_flops
from tests.support.tracer.reading import only_folder
from tests.support.tracer.recording import run_script

if TYPE_CHECKING:
    from pathlib import Path


def test_the_manifest_names_secrets_without_their_values(tmp_path: Path) -> None:
    done = run_script(
        "from rankscope import tracer\n"
        "tracer.install(config={'hub_token': 'hf_1', 'tokenizer': 'gpt2', 'num_tokens': 7,"
        " 'tracking': {'apiKey': 'k1', 'secrets': ['s1', {'more': 's2'}], 'name': 'run'}})",
        tmp_path,
        NCCL_AUTH_TOKEN="t1",
        TORCH_STORE_PASSWORD="p1",
        CUDA_LICENSE_KEY="",
        NCCL_DEBUG="INFO",
    )
    assert done.returncode == 0, done.stderr
    manifest = json.loads((only_folder(tmp_path) / "manifest.json").read_text())

    environment = manifest["environment"]
    assert environment["NCCL_AUTH_TOKEN"] == environment["TORCH_STORE_PASSWORD"] == "hidden"
    assert (environment["CUDA_LICENSE_KEY"], environment["NCCL_DEBUG"]) == ("", "INFO")
    assert manifest["config"] == {
        "hub_token": "hidden",
        "tokenizer": "gpt2",
        "num_tokens": 7,
        "tracking": {"apiKey": "hidden", "secrets": ["hidden", {"more": "hidden"}], "name": "run"},
    }


@pytest.mark.parametrize("name", ["NCCL_IB_PKEY", "db.password", "PASSWD", "secretKeyFile", "Keys"])
def test_a_name_of_a_secret_is_recognised(name: str) -> None:
    assert hide_secrets({name: "x"}) == {name: "hidden"}


@pytest.mark.parametrize("name", ["tokenizer", "keyboard", "secretary", "TORCH_HOME"])
def test_another_name_is_not(name: str) -> None:
    assert hide_secrets({name: "x"}) == {name: "x"}


@pytest.mark.parametrize("variable", sorted(VARIABLES))
@pytest.mark.parametrize(
    ("given", "flops"),
    [("", None), ("989e12", 989e12), ("0", None), ("-1", None), ("nan", None), ("fast", None)],
)
def test_the_environment_declares_what_mfu_needs(
    variable: str, given: str, flops: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_flops({variable: given}, variable) == flops

    is_wrong = bool(given) and flops is None
    assert (f"{variable} must be FLOP" in capsys.readouterr().err) == is_wrong


@pytest.mark.parametrize(
    ("declared", "peak", "flops"),
    [("", 7e12, 3e9), ("peak_flops_per_s=5e12, flops_per_token=4e9", 5e12, 4e9)],
)
def test_what_the_job_declares_goes_before_the_environment(
    tmp_path: Path, declared: str, peak: float, flops: float
) -> None:
    done = run_script(
        f"from rankscope import tracer\ntracer.install({declared})",
        tmp_path,
        RANKSCOPE_PEAK_FLOPS="7e12",
        RANKSCOPE_FLOPS_PER_TOKEN="3e9",
    )

    assert done.returncode == 0, done.stderr
    manifest = json.loads((only_folder(tmp_path) / "manifest.json").read_text())
    assert manifest["device"]["peak_flops_per_s"] == peak
    assert manifest["model"]["flops_per_token"] == flops

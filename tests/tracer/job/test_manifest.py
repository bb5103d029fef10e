"""Secrets in a manifest."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from rankscope.tracer.job.manifest import hide_secrets
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

"""deploy/prepare.sh: it writes private keys and a valid certificate."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
import yaml

from rankscope.collector.http.tls import TlsFiles, load_tls
from tests.deploy.files import DEPLOY, PREPARE, prepared_variables
from tests.support.missing_tools import skip_for_missing

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.multiproc


@pytest.fixture(autouse=True)
def _openssl() -> None:
    if shutil.which("openssl") is None:
        skip_for_missing("openssl is not on PATH: install it")


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    (tmp_path / "deploy").mkdir()
    shutil.copy(PREPARE, tmp_path / "deploy" / "prepare.sh")
    prepare(tmp_path, "collect.example", "10.1.2.3")
    return tmp_path


def prepare(folder: Path, *hosts: str) -> None:
    command = [str(folder / "deploy" / "prepare.sh"), *hosts]
    subprocess.run(command, check=True, capture_output=True, timeout=180)


def values(folder: Path) -> dict[str, str]:
    lines = (folder / ".env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines)


def test_all_files_of_the_compose_file_exist_and_are_private(
    prepared: Path,
) -> None:
    assert prepared_variables() <= values(prepared).keys()
    private = [path for path in prepared.rglob("*") if path.is_file() and path.suffix != ".sh"]
    assert {path.name for path in private} == {
        ".env",
        "ca.key",
        "ca.crt",
        "server.key",
        "server.crt",
    }
    assert all(path.stat().st_mode & 0o077 == 0 for path in private)
    # The folders mounted into containers contain no key that could sign certificates.
    assert not (prepared / "deploy" / "secrets" / "tls" / "ca.key").exists()


def test_the_certificate_has_every_name_in_use(prepared: Path) -> None:
    folder = prepared / "deploy" / "secrets" / "tls"
    tls = load_tls(TlsFiles(cert=folder / "server.crt", key=folder / "server.key"))

    assert {"localhost", "collector-1", "collector-2", "collect.example", "10.1.2.3"} <= tls.names
    trusting = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    assert len(trusting.get_ca_certs()) == 1
    done = subprocess.run(
        # Python 3.13 checks as strictly.
        ["openssl", "verify", "-x509_strict", "-CAfile", str(folder / "ca.crt"),
         str(folder / "server.crt")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_second_run_changes_nothing(prepared: Path) -> None:
    before = {path: path.read_bytes() for path in prepared.rglob("*") if path.is_file()}

    prepare(prepared, "another.example")

    assert {path: path.read_bytes() for path in prepared.rglob("*") if path.is_file()} == before


def test_a_certificate_that_expires_soon_is_renewed_with_its_names(prepared: Path) -> None:
    tls = prepared / "deploy" / "secrets" / "tls"
    subprocess.run(
        ["openssl", "req", "-x509", "-key", "server.key", "-days", "20", "-subj", "/CN=old",
         "-addext", "subjectAltName=DNS:old.example,IP:10.1.2.3", "-out", "server.crt"],
        cwd=tls, check=True, capture_output=True,
    )  # fmt: skip
    key = (tls / "server.key").read_bytes()

    prepare(prepared)

    renewed = load_tls(TlsFiles(cert=tls / "server.crt", key=tls / "server.key"))
    assert renewed.names == {"old.example", "10.1.2.3"}
    assert renewed.expires_s - time.time_ns() / 1e9 > 300 * 86_400
    assert (tls / "server.key").read_bytes() != key
    assert {path.name for path in tls.iterdir()} == {"ca.crt", "server.crt", "server.key"}


def test_passwords_are_long_different_and_need_no_escaping_in_a_url(prepared: Path) -> None:
    secrets = [
        value for name, value in values(prepared).items() if re.search("PASSWORD|SECRET", name)
    ]

    assert len(set(secrets)) == len(secrets) == 4
    assert all(re.fullmatch("[0-9a-f]{48}", value) for value in secrets)


def test_the_alertmanagers_file_is_yaml_with_a_receiver_for_its_route() -> None:
    document = yaml.safe_load((DEPLOY / "alertmanager" / "alertmanager.yml").read_text())

    assert document["route"]["receiver"] in {one["name"] for one in document["receivers"]}

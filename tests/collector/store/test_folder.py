"""The folder of an embedded store: private, writable, and with room."""

from __future__ import annotations

import shlex
import signal
import stat
import subprocess
from typing import TYPE_CHECKING

import httpx
import pytest

from rankscope.collector.errors import StoreError
from rankscope.collector.store.store import open_store
from tests.integration.programs import COMMAND, TIMEOUT_S, environment
from tests.support.mounts import needs_mounts

if TYPE_CHECKING:
    from pathlib import Path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def in_namespace(script: str, store: Path) -> subprocess.Popen[str]:
    """Start a shell script that may mount, with ``$0`` as the store and ``$@`` as the command."""
    needs_mounts()
    # A background job of a shell ignores SIGINT, and so would every program started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return subprocess.Popen(
        ["unshare", "-rm", "sh", "-c", script, str(store), *COMMAND],
        env=environment(store),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_existing_folder_is_closed_to_other_users(tmp_path: Path) -> None:
    # GIVEN an empty folder that all users may read, as mkdir makes it
    path = tmp_path / "store"
    path.mkdir()
    path.chmod(0o755)

    # THEN it is private when the store is opened, also if it was opened up again since
    for mode in (0o755, 0o2775, 0o711):
        path.chmod(mode)
        open_store(f"chdb://{path}").close()
        assert mode_of(path) & 0o077 == 0


def test_a_folder_with_other_files_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    tmp_path.chmod(0o755)

    with pytest.raises(StoreError, match=rf"mode 755.*run chmod 700 {tmp_path}"):
        open_store(f"chdb://{tmp_path}")

    assert mode_of(tmp_path) == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.multiproc
def test_a_store_on_a_read_only_disk_is_named_as_such(tmp_path: Path) -> None:
    store = tmp_path / "store"
    open_store(f"chdb://{store}").close()

    mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0"'
    _, err = in_namespace(f'{mount} && exec "$@" runs', store).communicate(timeout=TIMEOUT_S)

    assert err.startswith(f"rankscope: the store at {store} is read-only")
    assert len(err.splitlines()) == 1
    assert "backup" not in err


@pytest.mark.multiproc
@pytest.mark.slow
def test_a_server_that_starts_on_a_full_disk_says_so_and_answers_queries(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with open_store(f"chdb://{store}") as opened:
        opened.insert_rows("clock", [{"host": "first", "at_ns": 1}])
    kept = shlex.quote(str(tmp_path / "kept"))

    full = (
        f'cp -a "$0" {kept} && mount -t tmpfs -o size=64m,mode=700 tmpfs "$0"'
        f' && cp -a {kept}/. "$0" && {{ cat /dev/zero > "$0/filler"; exec "$@" serve; }}'
    )
    server = in_namespace(full, store)
    assert server.stdout is not None
    line = server.stdout.readline()
    assert "?token=" in line, server.communicate(timeout=TIMEOUT_S)
    url, token = line.split()[-1].split("/?token=")
    answer = httpx.post(
        url,
        content="SELECT host FROM clock",
        headers={"authorization": f"Bearer {token}"},
        timeout=TIMEOUT_S,
    )
    server.terminate()
    _, err = server.communicate(timeout=TIMEOUT_S)

    assert answer.text == "first\n"
    assert f"rankscope: cannot write {store}/server.json (No space left on device)" in err
    assert "free some space" in err

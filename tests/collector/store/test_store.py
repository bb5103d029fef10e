from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from rankscope.collector.arrow_columns import (
    coded_strings,
    numbers,
    optional_numbers,
    to_codes,
    to_numpy,
)
from rankscope.collector.errors import (
    StoreClosedError,
    StoreError,
    StoreHeldError,
    StoreQueryError,
)
from rankscope.collector.store.location import write_server_file
from rankscope.collector.store.migrations import known_migrations
from rankscope.collector.store.store import ALLOCATOR_VARIABLE, Store, migrate, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def folder(tables: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tables, tmp_path / "a store with spaces", symlinks=True)


def url_of(folder: Path) -> str:
    return f"chdb://{folder}"


def test_a_fresh_store_has_every_table_and_the_newest_version(tmp_path: Path) -> None:
    with open_store(url_of(tmp_path / "fresh")) as store:
        names = {
            row["name"]
            for row in store.rows(
                "SELECT name FROM system.tables WHERE database = currentDatabase()"
                " AND engine != 'MaterializedView'"
            )
        }
        assert store.schema_version() == known_migrations()[-1].version
    assert names == {
        "annotations", "attempts", "bad_rows", "clock", "closed_steps", "deletions", "events",
        "expired", "findings", "groups", "heartbeats", "host_changes", "host_checks",
        "kept_spans", "kernels", "leases", "ledger", "manifests", "merged_ledger",
        "microbatches", "owners", "pictures", "placements", "ranks", "reports", "rollups",
        "run_totals", "runs", "samples", "schema_version", "segment_totals", "spans",
        "step_spans", "steps",
    }  # fmt: skip


@pytest.mark.slow
def test_rows_survive_closing_and_opening_again(folder: Path) -> None:
    with open_store(url_of(folder)) as store:
        store.insert_rows("clock", [{"host": "h", "at_ns": 2**62}])
    with open_store(url_of(folder)) as store:
        assert store.rows("SELECT host, at_ns FROM clock") == [{"host": "h", "at_ns": 2**62}]


@pytest.mark.slow
def test_migrations_can_run_again_after_an_interruption(folder: Path) -> None:
    with open_store(url_of(folder)) as store:
        store.insert_rows("clock", [{"host": "kept"}])
        assert migrate(store) == migrate(store)
        store.command("TRUNCATE TABLE schema_version")  # as if killed before it was recorded
        migrate(store)
        assert store.rows("SELECT host FROM clock") == [{"host": "kept"}]


def test_migration_numbers_have_no_gap() -> None:
    versions = [migration.version for migration in known_migrations()]

    assert versions == list(range(1, len(versions) + 1))


HOLDER = """
import sys
from pathlib import Path
from rankscope.collector.store.location import write_server_file
from rankscope.collector.store.store import open_store
with open_store("chdb://" + sys.argv[1]) as store:
    if sys.argv[2]:
        write_server_file(store.path, url=sys.argv[2])
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(params=["", "http://127.0.0.1:8050"], ids=["holder", "server"])
def holder(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[int, str]]:
    command = [sys.executable, "-c", HOLDER, str(folder), request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process.pid, request.param


@pytest.mark.multiproc
def test_the_error_for_a_store_in_use_names_its_process(
    folder: Path, holder: tuple[int, str], capfd: pytest.CaptureFixture[str]
) -> None:
    pid, url = holder

    with pytest.raises(StoreHeldError) as caught:
        open_store(url_of(folder))

    assert (caught.value.holder_pid, caught.value.holder_url) == (pid, url or None)
    assert f"in use by process {pid}" in str(caught.value)
    assert "--store" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""  # no line of the engine itself


def test_a_process_cannot_open_two_embedded_stores(folder: Path) -> None:
    with open_store(url_of(folder)), pytest.raises(StoreError, match="close that one first"):
        open_store(url_of(folder.with_name("second")))


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file, not a folder")

    with pytest.raises(StoreError, match="pass another --store"):
        open_store(url_of(tmp_path / "file" / "store"))


@pytest.mark.slow
def test_each_thread_has_its_own_client_until_it_ends(folder: Path) -> None:
    with open_store(url_of(folder)) as store:
        barrier = threading.Barrier(4)

        def write(number: int) -> None:
            store.insert_rows("clock", [{"host": f"h{number}"}])
            barrier.wait()  # all have a client ...
            barrier.wait()  # ... until they are counted below

        threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        barrier.wait()
        assert set(store._clients) == set(threads)
        barrier.wait()
        for thread in threads:
            thread.join()
        newer = threading.Thread(target=store.rows, args=("SELECT 1",))
        newer.start()
        newer.join()

        assert set(store._clients) == {newer}
        assert store.rows("SELECT count() AS n FROM clock") == [{"n": 3}]


@pytest.mark.slow
def test_another_store_opens_at_once_while_threads_of_a_closed_one_end(
    tables: Path, tmp_path: Path
) -> None:
    def ask(store: Store) -> None:
        with suppress(StoreError):  # closed meanwhile
            store.rows("SELECT 1")

    folders = [shutil.copytree(tables, tmp_path / f"{i}", symlinks=True) for i in range(2)]
    for folder in folders * 10:
        with open_store(url_of(folder)) as store:
            threads = [threading.Thread(target=ask, args=(store,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            threads[0].join()


@pytest.mark.slow
def test_the_engine_outlives_the_thread_that_opened_it(folder: Path) -> None:
    opened: list[Store] = []
    thread = threading.Thread(target=lambda: opened.append(open_store(url_of(folder))))
    thread.start()
    thread.join()

    with opened[0] as store:
        assert store.rows("SELECT count() AS n FROM clock") == [{"n": 0}]


@pytest.mark.slow
def test_a_closed_store_cannot_be_used(folder: Path) -> None:
    store = open_store(url_of(folder))
    store.close()
    store.close()

    with pytest.raises(StoreClosedError, match="open it again"):
        store.rows("SELECT 1")


FORKER = """
import os, sys
from rankscope.collector.errors import StoreClosedError
from rankscope.collector.store.store import open_store
store = open_store("chdb://" + sys.argv[1])
child = os.fork()
if not child:
    try:
        store.rows("SELECT 1")
    except StoreClosedError as error:
        store.close()
        os._exit(7 if "fork" in str(error) else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
store.close()
"""


@pytest.mark.multiproc
def test_a_forked_child_gets_an_error_and_does_not_hang(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKER, str(folder)],
        capture_output=True, text=True, timeout=180, check=True,
    )  # fmt: skip

    assert done.stdout == "7\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO clock (host) VALUES ('x')",
        "DROP TABLE spans",
        "SET max_threads = 64",
        "SET readonly = 0",
        "SELECT * FROM file('/etc/passwd')",
        "SELECT * FROM url('http://127.0.0.1:1/')",
    ],
)
def test_a_read_only_store_refuses_everything_but_reads(folder: Path, statement: str) -> None:
    open_store(url_of(folder)).close()
    with open_store(url_of(folder), read_only=True) as store:
        assert store.rows("SELECT count() AS n FROM spans") == [{"n": 0}]
        with pytest.raises(StoreQueryError, match="readonly"):
            store.command(statement)


@pytest.mark.slow
def test_the_error_of_a_refused_statement_is_one_line(folder: Path) -> None:
    with open_store(url_of(folder)) as store, pytest.raises(StoreQueryError) as caught:
        store.rows("SELECT nonsense FROM spans")

    assert "nonsense" in str(caught.value)
    assert "\n" not in str(caught.value)


FAILS_HALFWAY = "SELECT number, throwIf(number = 190000) AS is_end FROM numbers(200000)"


@pytest.mark.parametrize("read", [Store.rows, Store.arrow], ids=["rows", "arrow"])
def test_the_answer_after_a_failed_one_has_nothing_of_it(
    folder: Path, read: Callable[[Store, str], object]
) -> None:
    with open_store(url_of(folder)) as store:
        with pytest.raises(StoreQueryError):
            read(store, FAILS_HALFWAY)

        assert store.rows("SELECT 1 AS x") == [{"x": 1}]


def test_a_bound_parameter_is_never_parsed_as_sql(folder: Path) -> None:
    hostile = "x' OR 1 = 1 -- \\'; DROP TABLE clock {x:String}"
    with open_store(url_of(folder)) as store:
        store.insert_rows("clock", [{"host": hostile}, {"host": "harmless"}])
        found = store.rows("SELECT host FROM clock WHERE host = {h:String}", {"h": hostile})

    assert found == [{"host": hostile}]


@pytest.mark.slow
def test_columns_are_stored_and_read_unchanged(folder: Path) -> None:
    table = pa.Table.from_arrays(
        [
            coded_strings(np.array([1, 0, 1, 2]), ["beta", "alpha", "beta"]),
            numbers(np.array([2**62, 0, -1, 5])),
            optional_numbers(np.array([7, 8, 9, 0], np.uint32), np.array([1, 0, 1, 0], bool)),
        ],
        names=["name", "start_ns", "parent_row"],
    )  # fmt: skip
    with open_store(url_of(folder)) as store:
        store.insert_arrow("spans", table)
        found = store.arrow("SELECT name, start_ns, parent_row FROM spans ORDER BY start_ns")

    codes, texts = to_codes(found["name"])
    assert [texts[code] for code in codes] == ["alpha", "beta", "beta", "alpha"]
    assert to_numpy(found["start_ns"]).tolist() == [-1, 0, 5, 2**62]
    assert found["parent_row"].to_pylist() == [9, None, None, 7]


@pytest.mark.multiproc
def test_opening_a_store_loads_neither_pandas_nor_torch(folder: Path) -> None:
    program = (
        "import sys; from rankscope.collector.store.store import open_store;"
        f" store = open_store({url_of(folder)!r});"
        " store.arrow('SELECT * FROM spans'); store.close();"
        " print(sorted({'pandas', 'torch'} & set(sys.modules)))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout == "[]\n"


CACHES = (
    "mark_cache_size",
    "query_condition_cache_size",
    "uncompressed_cache_size",
)


@pytest.mark.slow
def test_the_settings_limit_the_engines_memory(folder: Path) -> None:
    with open_store(url_of(folder)) as store:
        found = {
            row["name"]: row["value"]
            for row in store.rows("SELECT name, value FROM system.settings")
        }
        server = {
            row["name"]: row["value"]
            for row in store.rows("SELECT name, value FROM system.server_settings")
        }

    assert (found["max_threads"], found["async_insert"]) == ("2", "0")
    assert found["compile_aggregate_expressions"] == "0"
    assert int(found["max_memory_usage"]) == 4 << 30
    assert int(server["max_server_memory_usage"]) == 6 << 30
    # The caches and merges that docs/store.md documents.
    assert {name: int(server[name]) >> 20 for name in CACHES} == {
        "mark_cache_size": 256, "query_condition_cache_size": 0, "uncompressed_cache_size": 0,
    }  # fmt: skip
    pool = int(server["background_pool_size"])
    assert pool * float(server["background_merges_mutations_concurrency_ratio"]) == 2


def test_tables_keep_no_threads_and_no_statistics_after_merges(folder: Path) -> None:
    with open_store(url_of(folder)) as store:
        tables = store.rows(
            "SELECT name, engine_full FROM system.tables"
            " WHERE database = currentDatabase() AND engine LIKE '%MergeTree'"
        )

    # The table of versions has one row per version, so it needs neither setting.
    for setting in ("concurrent_part_removal_threshold = 1000000", "auto_statistics_types = ''"):
        unset = {row["name"] for row in tables if setting not in row["engine_full"]}
        assert unset == {"schema_version"}


@pytest.mark.slow
@pytest.mark.parametrize("own", [None, "tcache_max:2048"], ids=["ours", "the user's own"])
def test_the_engines_thread_caches_are_limited(folder: Path, own: str | None) -> None:
    code = (
        "import os, sys; from rankscope.collector.store.store import open_store;"
        " before = os.environ.get('JE_MALLOC_CONF'); store = open_store(sys.argv[1]);"
        " assert os.environ.get('JE_MALLOC_CONF') == before;"
        " print(store.rows('SELECT * FROM system.jemalloc_stats')[0]['stats'])"
    )
    environ = {key: value for key, value in os.environ.items() if key != ALLOCATOR_VARIABLE}
    output = subprocess.run(
        [sys.executable, "-c", code, url_of(folder)],
        env=environ if own is None else {**environ, ALLOCATOR_VARIABLE: own},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip

    assert f"opt.tcache_max: {own.partition(':')[2] if own else 1024}\n" in output
    assert ("opt.tcache_nslots_small_max: 20\n" in output) == (own is None)


def test_the_server_file_is_readable_by_its_owner_only(folder: Path) -> None:
    with open_store(url_of(folder)) as store:
        assert isinstance(store, Store)
        path = write_server_file(folder, url="http://127.0.0.1:1", token="secret")

    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in folder.glob("server*")] == ["server.json"]

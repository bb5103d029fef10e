from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fastapi import FastAPI

from rankscope.collector.http.application import deletion_router
from rankscope.collector.http.gate import GRANT_KEY, rule_of
from rankscope.collector.http.tokens import FULL_GRANT, Grant, Role
from rankscope.collector.retention.deletion import Deletions
from tests.support.collector.asgi import Client

if TYPE_CHECKING:
    from rankscope.collector.http.requests import AsgiApp, Receive, Scope, Send
    from rankscope.collector.store.store import Store


def client_of(store: Store, *, grant: Grant = FULL_GRANT) -> Client:
    """Return a visitor whom the gate has let in with this grant."""
    app = FastAPI()
    app.include_router(deletion_router(store, Deletions(store)))

    async def granted(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, GRANT_KEY: grant}, receive, send)

    gate: AsgiApp = granted
    return Client(gate)


def test_it_deletes_the_run_and_says_what_went(store: Store, run_id: str) -> None:
    store.insert_rows("runs", [{"run_id": run_id}])
    store.insert_rows("spans", [{"run_id": run_id, "row": 0}, {"run_id": run_id, "row": 1}])

    answer = client_of(store).request("DELETE", f"/v1/runs?run_id={run_id}")

    assert answer.status_code == 200
    document = answer.json()
    assert (document["schema"], document["run"]) == (1, run_id)
    assert document["num_rows"] == {"runs": 1, "spans": 2}
    assert Deletions(store).deleted_ns(run_id) == document["at_ns"]


def test_a_run_of_which_only_spans_came_is_deleted_too(store: Store, run_id: str) -> None:
    store.insert_rows("spans", [{"run_id": run_id, "row": 0}])

    answer = client_of(store).request("DELETE", f"/v1/runs?run_id={run_id}")

    assert (answer.status_code, answer.json()["num_rows"]) == (200, {"spans": 1})
    assert Deletions(store).is_deleted(run_id)


def test_to_ask_again_is_no_error(store: Store, run_id: str) -> None:
    store.insert_rows("runs", [{"run_id": run_id}])
    client = client_of(store)
    first = client.request("DELETE", f"/v1/runs?run_id={run_id}").json()

    again = client.request("DELETE", f"/v1/runs?run_id={run_id}")

    assert again.status_code == 200
    assert again.json() == {**first, "num_rows": {}}


@pytest.mark.parametrize(
    ("query", "status"),
    [("run_id=nobody", 404), ("run_id=a%20b", 400), ("run_id=", 400), ("", 422)],
)
def test_what_is_no_run_of_the_store_is_refused(store: Store, query: str, status: int) -> None:
    answer = client_of(store).request("DELETE", f"/v1/runs?{query}")

    assert answer.status_code == status


def test_a_token_for_other_runs_deletes_nothing(store: Store, run_id: str) -> None:
    store.insert_rows("runs", [{"run_id": run_id}])
    grant = Grant(role=Role.ADMIN, run_prefix="other-", token_id="t")

    answer = client_of(store, grant=grant).request("DELETE", f"/v1/runs?run_id={run_id}")

    assert answer.status_code == 403
    assert not Deletions(store).is_deleted(run_id)


def test_only_an_admin_may_ask() -> None:
    assert rule_of("DELETE", "/v1/runs").role is Role.ADMIN

"""``DELETE /v1/runs?run_id=``: delete a run of the store that a server holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, HTTPException, Request

from ..errors import RunNameError
from ..identity import check_run_name
from .gate import GRANT_KEY

if TYPE_CHECKING:
    from ..retention.deletion import Deletions
    from ..store.store import Store
    from .tokens import Grant

SCHEMA = 1


def deletion_router(store: Store, deletions: Deletions) -> APIRouter:
    """Return the route. It answers 200 with what was removed (for a run that was deleted
    before: with what came in since), 400 for a name that no run can have, 403 where the token
    is for other runs, 404 for a run that the store does not hold.
    """
    router = APIRouter()

    # Not async: the engine blocks, so it works in a thread of the pool.
    def delete_run(run_id: str, request: Request) -> dict[str, Any]:
        grant: Grant = request.scope[GRANT_KEY]
        try:
            check_run_name(run_id)
        except RunNameError as error:
            raise HTTPException(400, str(error)) from None
        if not grant.covers(run_id):
            raise HTTPException(403, "this token is for other runs")
        if not deletions.is_deleted(run_id) and not deletions.has_rows(run_id):
            raise HTTPException(404, f"no run {run_id!r} in this store")
        deletion = deletions.delete(run_id)
        return {
            "schema": SCHEMA,
            "run": deletion.run_id,
            "at_ns": deletion.at_ns,
            "num_rows": deletion.num_rows,
        }

    router.add_api_route("/v1/runs", delete_run, methods=["DELETE"])
    return router

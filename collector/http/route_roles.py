"""Which role each route needs. A route that is not in the table is for admins alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .tokens import Role

if TYPE_CHECKING:
    from .tokens import Grant

API_PREFIX = "/v1/"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRule:
    """What a route asks of a token."""

    role: Role
    any_scope: bool
    """Whether a token for some runs only may come: the route touches no run, or checks the
    run itself by the grant that the gate leaves in the scope."""


ROUTE_RULES = {
    ("GET", "/v1/openapi.json"): RouteRule(role=Role.READ, any_scope=True),
    ("HEAD", "/v1/openapi.json"): RouteRule(role=Role.READ, any_scope=True),
    ("DELETE", "/v1/runs"): RouteRule(role=Role.ADMIN, any_scope=True),
    ("GET", "/metrics"): RouteRule(role=Role.READ, any_scope=False),
    # Statements can't be limited to some runs, and read all of them.
    ("POST", "/"): RouteRule(role=Role.READ, any_scope=False),
    ("GET", "/ping"): RouteRule(role=Role.READ, any_scope=False),
    ("POST", "/logout"): RouteRule(role=Role.READ, any_scope=True),
    ("POST", "/v1/clock"): RouteRule(role=Role.INGEST, any_scope=True),
    ("POST", "/v1/spans"): RouteRule(role=Role.INGEST, any_scope=True),
    ("POST", "/v1/rows/{table}"): RouteRule(role=Role.INGEST, any_scope=True),
    ("GET", "/v1/resume"): RouteRule(role=Role.INGEST, any_scope=True),
}
"""By method and path, as the application has them. A last part in braces stands for any one."""

_OF_FOLDERS = {
    (method, path.rpartition("/")[0]): rule
    for (method, path), rule in ROUTE_RULES.items()
    if path.endswith("}")
}

PAGES = RouteRule(role=Role.READ, any_scope=False)
"""Everything outside `API_PREFIX` is the dashboard, which shows all runs and changes none."""

UNKNOWN = RouteRule(role=Role.ADMIN, any_scope=False)


def rule_of(method: str, path: str) -> RouteRule:
    """Return what a request needs."""
    known = ROUTE_RULES.get((method, path)) or _OF_FOLDERS.get((method, path.rpartition("/")[0]))
    if known is not None:
        return known
    return UNKNOWN if path.startswith(API_PREFIX) else PAGES


def is_allowed(grant: Grant, method: str, path: str) -> bool:
    """Tell whether a grant covers a request, as far as that shows without its body."""
    rule = rule_of(method, path)
    return grant.allows(rule.role) and (rule.any_scope or not grant.run_prefix)

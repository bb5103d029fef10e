"""The Dash application: one frame, and in it the page that the address names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dash import Dash
from dash.exceptions import DependencyException

from .callback_checks import guard
from .exports import register_exports
from .pages import (
    alerts,
    compare,
    health,
    incident,
    links,
    mfu,
    overview,
    rank,
    runs,
    shell,
    start_up,
    timeline,
    wait_graph,
    what_if,
)
from .pages.refresh import register_refresh

if TYPE_CHECKING:
    from .provider import ReportProvider

PAGES = (
    overview.PAGE,
    incident.PAGE,
    timeline.PAGE,
    rank.PAGE,
    mfu.PAGE,
    links.PAGE,
    wait_graph.PAGE,
    what_if.PAGE,
    start_up.PAGE,
    compare.PAGE,
    runs.PAGE,
    alerts.PAGE,
    health.PAGE,
)
"""The pages, in the order of the menu."""

NO_SCRIPT = "404: there is no such file\n", 404, {"Content-Type": "text/plain"}
"""Answer to a request for a script of no component, which Dash raises as an error."""

ASSET_AGE_S = 365 * 86_400


def create_app(provider: ReportProvider) -> Dash:
    """Build the application over finished results; ``app.server`` is its WSGI callable.

    It neither listens nor authenticates: the server that mounts it does both, and sends
    `content_security_policy` with each response.
    """
    app = Dash(
        "rankscope",
        assets_folder=str(Path(__file__).parent / "assets"),
        serve_locally=True,
        requests_pathname_prefix="/",
        routes_pathname_prefix="/",
        suppress_callback_exceptions=True,
        title="rankscope",
        update_title="",
        meta_tags=[
            {"name": "viewport", "content": "width=device-width, initial-scale=1"},
            {"name": "color-scheme", "content": "light dark"},
            {"name": "robots", "content": "noindex"},
        ],
        add_log_handler=False,
        enable_mcp=False,
    )
    app.index_string = app.index_string.replace("<html>", '<html lang="en">')
    app.server.debug = False  # FLASK_DEBUG would show tracebacks
    app.server.register_error_handler(DependencyException, lambda _error: NO_SCRIPT)
    guard(app)
    # Dash names the time of a file's last change in its address.
    app.server.config["SEND_FILE_MAX_AGE_DEFAULT"] = ASSET_AGE_S
    register_exports(app.server, provider)
    app.layout = shell.shell()
    shell.register(app, provider, PAGES)
    register_refresh(app, provider, PAGES)
    for page in PAGES:
        if page.register is not None:
            page.register(app, provider)
    return app


def content_security_policy(app: Dash) -> str:
    """Return the ``Content-Security-Policy`` under which every page works.

    Scripts: our own, and the one line that starts Dash, by its hash. Inline styles are allowed
    because Mantine and plotly write style elements while they run.
    """
    scripts = " ".join(["'self'", *app.csp_hashes()])
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {scripts}",
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data: blob:",
            "font-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )

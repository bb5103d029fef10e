"""The Dash application: one frame, and the page that the address names."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import TYPE_CHECKING

from dash import Dash, Input, Output, State
from dash.exceptions import DependencyException
from flask import request

from .address import Page, read_address
from .callback_checks import guard
from .pages import overview, shell, timeline
from .pages.placeholders import unknown_page

if TYPE_CHECKING:
    from dash.development.base_component import Component
    from flask import Flask, Response

    from .provider import ReportProvider


def create_app(provider: ReportProvider, *, base_path: str = "/") -> Dash:
    """Build the application over finished results; ``app.server`` is its WSGI callable.

    It listens on nothing and guards nothing: whoever mounts it does both, and
    sets `content_security_policy` on what it answers.

    Args:
        provider: Where the results come from.
        base_path: Under which the outside world reaches it, ``/`` at both
            ends. The mount strips it (WSGI's ``SCRIPT_NAME``).
    """
    app = Dash(
        "rankscope",
        assets_folder=str(Path(__file__).parent / "assets"),
        serve_locally=True,
        requests_pathname_prefix=base_path,
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
    app.server.debug = False  # FLASK_DEBUG would show tracebacks
    app.server.register_error_handler(DependencyException, _no_such_file)
    guard(app)
    compress_large(app.server)
    app.layout = shell.shell()
    shell.register(app, provider, base_path=base_path)
    overview.register(app, provider, base_path=base_path)
    timeline.register(app, provider, base_path=base_path)

    @app.callback(Output("page", "children"), Input("url", "pathname"), State("url", "search"))
    def show(path: str, search: str) -> Component:
        view = read_address(app.strip_relative_path(path) or "", search or "")
        if view.page is Page.UNKNOWN:
            return unknown_page(path)
        if view.page is Page.TIMELINE:
            return timeline.timeline_page(provider, view, base_path=base_path)
        return overview.overview_page(provider, view.run, base_path=base_path)

    return app


def _no_such_file(_error: Exception) -> tuple[str, int, dict[str, str]]:
    """Answer for a script that no component has; Dash takes it for an error of its own."""
    return "404: there is no such file\n", 404, {"Content-Type": "text/plain"}


def content_security_policy(app: Dash) -> str:
    """Return the ``Content-Security-Policy`` under which every page works.

    Scripts: our own, and the one line by which Dash starts itself, by its
    hash. Styles must be allowed inline: Mantine and plotly both write style
    elements while they run.
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


LEAST_BYTES = 32_768


LEVEL = 1
"""A picture takes 5 ms; level 6 would save a tenth and take three times as long."""


JSON = "application/json"


def compress_large(server: Flask) -> None:
    """Have ``server`` send large JSON documents gzipped to whoever takes them so."""

    def packed(response: Response) -> Response:
        takes = request.accept_encodings.quality("gzip") > 0
        if (
            not takes
            or response.mimetype != JSON
            or response.is_streamed
            or "Content-Encoding" in response.headers
            or (response.content_length or 0) < LEAST_BYTES
        ):
            return response
        response.set_data(gzip.compress(response.get_data(), LEVEL))
        response.headers["Content-Encoding"] = "gzip"
        response.vary.add("Accept-Encoding")
        return response

    server.after_request(packed)

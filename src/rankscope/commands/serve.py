"""`rankscope serve`: collect, analyse, alert and serve the dashboard."""

from pathlib import Path
from typing import Annotated

import typer

from .alerts import Config
from .flags import Port, SpoolFolder, Store


def serve(  # noqa: PLR0913  # one parameter a flag
    *,
    store: Store = None,
    spool: SpoolFolder = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. Any but a loopback address needs TLS and a token."
        ),
    ] = "127.0.0.1",
    port: Port = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Certificate chain, the server's first. PEM."),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Private key without a password, mode 0600.")
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Require client certificates that are signed by this CA."
        ),
    ] = None,
    server_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Host name of this server, besides those of the certificate. May be repeated.",
        ),
    ] = None,
    proxy_user_header: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Header in which a trusted proxy (OIDC) names the signed-in user, who may then"
            " read all pages. Needs --proxy-address. Default: off.",
        ),
    ] = None,
    proxy_address: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address of a proxy whose X-Forwarded-For and -Proto name the client, and whose"
            " user header is believed. May be repeated.",
        ),
    ] = None,
    log_json: Annotated[
        bool,
        typer.Option(
            "--log-json", help="Log as JSON documents to stderr, and never print the token."
        ),
    ] = False,
    alert_webhook: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="RANKSCOPE_ALERT_WEBHOOK",
            help=(
                "Post alerts to this URL, as JSON. On the command line all users of the machine"
                " see it: give a URL with a secret by --alert-webhook-file or in the environment."
            ),
        ),
    ] = None,
    alert_webhook_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File of mode 0600 with the URL to post alerts to."),
    ] = None,
    config: Config = None,
    topology: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="TOML or JSON file with the switch, rack and rails of each host."
        ),
    ] = None,
    spool_owner: Annotated[
        str | None,
        typer.Option(
            metavar="HOLDER",
            help="With --spool: holder of the tokens with which other hosts send the same runs.",
        ),
    ] = None,
    samples: Annotated[
        bool,
        typer.Option(
            "--samples", help="With --spool: also read the counters of this host and its devices."
        ),
    ] = False,
    logs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="With --samples: logs of the ranks, whose errors are stored. May be repeated.",
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="collector|dashboard",
            help="Run only this half of the server, on a store shared with others. Default: both.",
        ),
    ] = None,
    keep_spans: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="How long to keep spans after a run has ended: 48h, 30d, forever, ...",
        ),
    ] = "48h",
    keep_findings: Annotated[
        str,
        typer.Option(metavar="TIME", help="How long to keep spans of the steps around findings."),
    ] = "30d",
    keep_runs: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="How long to keep everything else of a run; then the run is removed.",
        ),
    ] = "365d",
) -> None:
    """Collect, analyse, alert and serve the dashboard."""
    from ..server.listen import ListenOptions
    from ..server.serve import (
        AlertOptions,
        ServeOptions,
        SpoolOptions,
        parse_part,
        parse_proxy,
        serve_store,
    )
    from ..server.upkeep import parse_keep

    serve_store(
        ServeOptions(
            store_url=store,
            listen=ListenOptions(
                host=host,
                port=port,
                tls_cert=tls_cert,
                tls_key=tls_key,
                tls_client_ca=tls_client_ca,
                server_names=tuple(server_name or ()),
            ),
            proxy=parse_proxy(proxy_user_header, proxy_address or ()),
            spool=None
            if spool is None
            else SpoolOptions(
                folder=spool, owner=spool_owner, samples=samples, logs=tuple(logs or ())
            ),
            alerts=AlertOptions(
                config=config, webhook=alert_webhook, webhook_file=alert_webhook_file
            ),
            topology=topology,
            keep=parse_keep(spans=keep_spans, findings=keep_findings, runs=keep_runs),
            only=parse_part(only),
            log_json=log_json,
        )
    )

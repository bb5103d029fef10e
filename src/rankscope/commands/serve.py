"""The subcommands that run until they are told to end: `serve` and `agent`."""

from pathlib import Path
from typing import Annotated

import typer

from .flags import Port, SpoolFolder, Store


def serve(  # noqa: PLR0913  # one parameter a flag
    *,
    store: Store = None,
    spool: SpoolFolder = None,
    host: Annotated[
        str, typer.Option(help="Any but a loopback address needs TLS and a token.")
    ] = "127.0.0.1",
    port: Port = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert", metavar="FILE", help="Certificate, then those up to the CA's; PEM."
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option("--tls-key", metavar="FILE", help="Its key, without a password, mode 0600."),
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-client-ca", metavar="FILE", help="CA whose certificates clients must show."
        ),
    ] = None,
    server_name: Annotated[
        list[str] | None,
        typer.Option(
            "--server-name",
            metavar="NAME",
            help="Host name of this server, besides its certificate's; may be repeated.",
        ),
    ] = None,
    connections_per_address: Annotated[
        int,
        typer.Option(
            "--connections-per-address",
            min=1,
            help="Behind a load balancer: as many as all its visitors need.",
        ),
    ] = 512,
    log_json: Annotated[
        bool,
        typer.Option(
            "--log-json", help="Say everything as JSON documents on stderr, and no token anywhere."
        ),
    ] = False,
    alert_webhook: Annotated[
        str | None,
        typer.Option(
            "--alert-webhook",
            metavar="URL",
            envvar="RANKSCOPE_ALERT_WEBHOOK",
            help="Where to post alerts to, as JSON.",
            show_default=False,
        ),
    ] = None,
    topology: Annotated[
        Path | None,
        typer.Option(
            "--topology",
            metavar="FILE",
            help="TOML or JSON that says which switch, rack and rail each host and device has.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[
        bool,
        typer.Option(
            "--samples", help="With --spool: read this host and its devices once a second too."
        ),
    ] = False,
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            metavar="collector|dashboard",
            help="One half of the server, on a store that others use too; default: both.",
            show_default=False,
        ),
    ] = None,
    keep_spans: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Spans of a run that has ended: 48h, 30d, forever, and so on."
        ),
    ] = "48h",
    keep_findings: Annotated[
        str, typer.Option(metavar="TIME", help="Spans of the steps around its findings.")
    ] = "30d",
    keep_runs: Annotated[
        str, typer.Option(metavar="TIME", help="All else of it; then it is gone.")
    ] = "365d",
) -> None:
    """Collect from a spool, analyse while runs train, alert, and serve the dashboard."""
    from ..server.listen import ListenOptions
    from ..server.serve import ServeOptions, parse_part, serve_store
    from ..server.upkeep import parse_keep

    serve_store(
        ServeOptions(
            store_url=store,
            spool=spool,
            listen=ListenOptions(
                host=host,
                port=port,
                tls_cert=tls_cert,
                tls_key=tls_key,
                tls_client_ca=tls_client_ca,
                server_names=tuple(server_name or ()),
                connections_per_address=connections_per_address,
            ),
            log_json=log_json,
            alert_webhook=alert_webhook,
            topology=topology,
            samples=samples,
            only=parse_part(only),
            keep=parse_keep(spans=keep_spans, findings=keep_findings, runs=keep_runs),
        )
    )

"""The subcommands: each parses its flags and hands over; what is heavy loads inside it."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="rankscope",
    help="Which rank of a distributed training is truly slow, which only wait for it, and why.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

token = typer.Typer(
    name="token",
    help="Make, list and revoke the tokens that let agents and people in.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(token)

Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        envvar="RANKSCOPE_STORE",
        help="chdb:///absolute/path or clickhouse://user:password@host:8123/database; "
        "default: the embedded store in your data folder.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
SpoolFolder = Annotated[
    Path | None, typer.Option("--spool", metavar="DIR", help="Folder that the ranks write to.")
]
Port = Annotated[
    int | None,
    typer.Option(
        "--port",
        min=1,
        max=65535,
        help="Default: 8050, or the next free one.",
        show_default=False,
    ),
]


@app.command("import")
def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", show_default=False)],
    *,
    file_format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="What the files are: bytedance.")
    ],
    run: Annotated[str, typer.Option("--run", metavar="NAME", help="Name of the run.")],
    meta: Annotated[
        Path | None,
        typer.Option("--meta", metavar="FILE", help="YAML with the job's sizes (bytedance)."),
    ] = None,
    store: Store = None,
) -> None:
    """Store a trace that another program recorded, as a run."""
    from rankscope.importing import import_files

    typer.echo(import_files(files, file_format=file_format, run_id=run, meta=meta, store_url=store))


@app.command()
def analyze(
    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)],
    *,
    steps: Annotated[
        str, typer.Option(metavar="A:B", help="Steps A to B, both included; either may be empty.")
    ] = ":",
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """Say which rank is slow, which ranks wait for it, and why."""
    from rankscope.analyzing import analyze_stored, parse_steps

    first, last = parse_steps(steps)
    typer.echo(analyze_stored(run, first=first, last=last, as_json=as_json, store_url=store))


@app.command()
def simulate(  # noqa: PLR0913  # one parameter a flag
    scenario: Annotated[
        str,
        typer.Argument(
            metavar="SCENARIO",
            help="healthy, a cause (slow-compute, slow-link, ...), or a .toml or .json file.",
            show_default=False,
        ),
    ],
    *,
    run: Annotated[str, typer.Option("--run", metavar="NAME", help="Name of the run.")],
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks, reached by --dp.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of all randomness.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Data-parallel positions.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline stages.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor-parallel positions.")] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="A further fault, as in the demo; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write parquet files there and nothing to the store."),
    ] = None,
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """Make up a run of a cluster of any size, with faults that are told afterwards."""
    from rankscope.simulating import SimulateOptions, simulate_run

    typer.echo(
        simulate_run(
            SimulateOptions(
                scenario=scenario,
                run_id=run,
                num_ranks=ranks,
                seed=seed,
                num_steps=steps,
                dp=dp,
                pp=pp,
                tp=tp,
                faults=tuple(fault or ()),
                out=out,
                store_url=store,
                as_json=as_json,
            )
        )
    )


@app.command()
def runs(
    *,
    delete: Annotated[
        str | None,
        typer.Option(
            "--delete",
            metavar="RUN",
            help="Delete this run for good; its name is not given again.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """List the runs of the store, the newest first, or delete one."""
    if delete is not None:
        from rankscope.deleting import delete_run

        typer.echo(delete_run(delete, as_json=as_json, store_url=store))
        return
    from rankscope.listing import list_runs

    typer.echo(list_runs(as_json=as_json, store_url=store))


@app.command()
def alerts(*, as_json: AsJson = False, store: Store = None) -> None:
    """List the alerts that have fired, the newest first."""
    from rankscope.listing import list_alerts

    typer.echo(list_alerts(as_json=as_json, store_url=store))


@app.command()
def findings(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", show_default=False)] = None,
    *,
    as_json: AsJson = False,
    store: Store = None,
) -> None:
    """List what was found in live runs, each from its onset to its end."""
    from rankscope.listing import list_findings

    typer.echo(list_findings(run, as_json=as_json, store_url=store))


@app.command()
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
    from rankscope.listening import ListenOptions
    from rankscope.serving import ServeOptions, parse_part, serve_store
    from rankscope.upkeep import parse_keep

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


@app.command()
def agent(  # noqa: PLR0913  # one parameter a flag
    *,
    spool: Annotated[
        Path, typer.Option("--spool", metavar="DIR", help="Folder that this host's ranks write to.")
    ],
    collector: Annotated[
        list[str],
        typer.Option(
            "--collector",
            metavar="URL",
            help="https://HOST[:PORT]; may be repeated: when one fails the next is asked.",
        ),
    ],
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="What was sent and not confirmed, and what was refused; default: DIR/.agent.",
            show_default=False,
        ),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Who may sign the collector's certificate."),
    ] = None,
    cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The agent's own certificate.")
    ] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="And its key.")] = None,
    samples: Annotated[
        bool,
        typer.Option("--samples/--no-samples", help="Read this host and its devices too."),
    ] = True,
    max_spool_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most bytes of the spool while nothing can be shipped; default: what the ranks"
            " allow themselves.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Ship what this host's ranks record to a collector; RANKSCOPE_TOKEN_FILE names the token."""
    from rankscope.agenting import AgentOptions, run_agent

    run_agent(
        AgentOptions(
            spool=spool,
            collectors=tuple(collector),
            state=state,
            ca=ca,
            certificate=cert,
            key=key,
            samples=samples,
            max_spool_bytes=max_spool_bytes,
        )
    )


@app.command()
def demo(  # noqa: PLR0913  # one parameter a flag
    *,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 2,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel positions.")] = 2,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel positions.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 30,
    fault: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="What to plant, or none; default: slow-compute on rank 5, 1.8 times, from a"
            " third of the steps on.",
            show_default=False,
        ),
    ] = None,
    serve_after: Annotated[
        bool, typer.Option("--serve/--no-serve", help="Serve the dashboard afterwards.")
    ] = True,
    as_json: AsJson = False,
    port: Port = None,
    spool: SpoolFolder = None,
    store: Store = None,
) -> None:
    """Train a small GPT here with one slow rank, find that rank, and show it."""
    from rankscope.demo import DemoOptions, run_demo

    status = run_demo(
        DemoOptions(
            pp=pp,
            dp=dp,
            tp=tp,
            num_steps=steps,
            fault=fault,
            serve=serve_after,
            as_json=as_json,
            port=port,
            spool=spool,
            store_url=store,
        )
    )
    raise typer.Exit(status)


@token.command("create")
def token_create(
    *,
    role: Annotated[str, typer.Option(metavar="ROLE", help="ingest, read or admin.")],
    run_prefix: Annotated[
        str,
        typer.Option("--run-prefix", metavar="TEXT", help="Runs that begin so; default: all."),
    ] = "",
    days: Annotated[int, typer.Option(min=1, help="How long it lives.")] = 90,
    holder: Annotated[
        str, typer.Option(metavar="NAME", help="Who carries it; two live ones for each.")
    ] = "default",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the token there, for its owner alone."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token; it is shown once and kept as a hash."""
    from rankscope.tokens import create_token

    typer.echo(
        create_token(
            role=role, run_prefix=run_prefix, holder=holder, days=days, out=out, as_json=as_json
        )
    )


@token.command("list")
def token_list(*, as_json: AsJson = False) -> None:
    """List the tokens: whose, for what, until when; never the tokens themselves."""
    from rankscope.tokens import list_tokens

    typer.echo(list_tokens(as_json=as_json))


@token.command("revoke")
def token_revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", show_default=False)],
    *,
    as_json: AsJson = False,
) -> None:
    """Make a token worthless, from the next request on."""
    from rankscope.tokens import revoke_token

    typer.echo(revoke_token(token_id, as_json=as_json))

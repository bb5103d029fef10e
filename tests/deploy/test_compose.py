"""docker-compose.yml: its services, their rights, and the files that they refer to."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import threading
from typing import Any
from xml.etree import ElementTree as Xml

import pytest
import typer.main
import yaml

from rankscope.collector.store.location import ServerLocation, parse_store_url
from rankscope.commands.app import app
from tests.deploy.files import (
    CLUSTER_XML,
    COMPOSE,
    DEPLOY,
    KEEPER_XML,
    PREPARE,
    SERVER_XML,
    USERS_XML,
    VARIABLE,
    compose,
    mounts,
    prepared_variables,
    profiles_of,
    services,
    texts,
    xml,
)
from tests.support.paths import ROOT

PROFILES = ("single", "cluster")
PINNED = re.compile(r"[\w./-]+:v?\d[\w.-]*@sha256:[0-9a-f]{64}")
"""Name of an image with version and digest."""


def names_in(profile: str) -> set[str]:
    """Return all names of containers in the network of a profile."""
    found = services(profile)
    aliases = {
        alias
        for service in found.values()
        for network in (service.get("networks") or {}).values()
        for alias in network.get("aliases", [])
    }
    return set(found) | aliases


def stores(profile: str) -> dict[str, str]:
    return {
        name: VARIABLE.sub("secret", service["environment"]["RANKSCOPE_STORE"])
        for name, service in services(profile).items()
        if "RANKSCOPE_STORE" in (service.get("environment") or {})
    }


def test_services_use_known_keys_only() -> None:
    # Docker refuses a file with a misspelt key, but only when the services are started.
    known = {
        "build", "cap_drop", "command", "depends_on", "entrypoint", "environment", "healthcheck",
        "hostname", "image", "mem_limit", "network_mode", "networks", "ports", "profiles",
        "read_only", "restart", "security_opt", "tmpfs", "ulimits", "user", "volumes",
    }  # fmt: skip
    of_healthcheck = {"test", "interval", "timeout", "retries", "start_period", "disable"}

    assert {name for name in compose() if not name.startswith("x-")} == {"services", "volumes"}
    for name, service in services().items():
        assert set(service) <= known, name
        assert set(service.get("healthcheck") or {}) <= of_healthcheck, name
        assert service["restart"] == ("no" if name == "token" else "unless-stopped"), name


def test_named_volumes_are_declared_once_and_used() -> None:
    used = {
        volume.partition(":")[0]
        for service in services().values()
        for volume in service.get("volumes", [])
        if not volume.startswith("./")
    }

    assert used == set(compose()["volumes"])


@pytest.mark.parametrize("name", sorted(services()))
def test_a_container_has_no_rights_beyond_a_plain_user_and_a_limit_of_memory(name: str) -> None:
    service = services()[name]

    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert re.fullmatch(r"[1-9]\d*[mg]", service["mem_limit"])
    user = service["user"].partition(":")[0]
    assert int(user) if user.isdigit() else user.startswith("${RANKSCOPE_UID")
    writable = [
        mount
        for mount in service["volumes"]
        if mount.startswith("./") and not mount.endswith(":ro")
    ]
    assert writable == (["./deploy/secrets/tokens:/tokens"] if name == "token" else [])


def test_each_profile_has_the_documented_services() -> None:
    beside = {"alertmanager", "grafana"}

    assert set(services("tools")) == {"token"}
    assert set(services("single")) == {
        "clickhouse", "collector", "dashboard", "proxy", "prometheus"
    } | beside  # fmt: skip
    assert set(services("cluster")) == {
        "keeper-1", "keeper-2", "keeper-3",
        "clickhouse-1-1", "clickhouse-1-2", "clickhouse-2-1", "clickhouse-2-2",
        "collector-1", "collector-2", "cluster-proxy", "cluster-dashboard",
        "cluster-prometheus",
    } | beside  # fmt: skip


@pytest.mark.parametrize("name", sorted(services()))
def test_the_dependencies_of_a_service_start_in_the_same_profiles(name: str) -> None:
    service = services()[name]

    for needed, how in (service.get("depends_on") or {}).items():
        other = services()[needed]
        assert profiles_of(name, service) <= profiles_of(needed, other)
        assert how["condition"] != "service_healthy" or "healthcheck" in other


@pytest.mark.parametrize("name", sorted(services()))
def test_images_are_pinned_and_mounted_files_exist(name: str) -> None:
    service = services()[name]

    assert PINNED.fullmatch(service["image"]) or "build" in service
    for source in mounts(service):
        made = source.startswith("./deploy/secrets/")
        assert made or (ROOT / source).exists(), source


def test_no_secret_is_in_the_file_and_every_variable_is_set_somewhere() -> None:
    text = COMPOSE.read_text(encoding="utf-8")
    found = {match["name"]: match["rest"] or "" for match in VARIABLE.finditer(text)}

    required = {name for name, rest in found.items() if not rest.startswith(":-")}
    assert required <= prepared_variables()
    assert all(found[name].startswith(":?") for name in required)  # compose fails if it is empty
    for service in services().values():
        for name, value in (service.get("environment") or {}).items():
            if re.search("PASSWORD|SECRET|TOKEN$", name):
                assert VARIABLE.fullmatch(value), name


def test_only_the_port_for_agents_is_published_beyond_loopback() -> None:
    published = {
        name: [VARIABLE.sub(lambda found: found["rest"][2:], port) for port in service["ports"]]
        for name, service in services().items()
        if "ports" in service
    }

    beyond_loopback = {
        (name, port) for name, ports in published.items() for port in ports
        if not port.startswith("127.0.0.1:")
    }  # fmt: skip
    agents = "0.0.0.0:8443:8443"
    assert beyond_loopback == {("proxy", agents), ("cluster-proxy", agents)}


@pytest.mark.parametrize("profile", PROFILES)
def test_the_store_of_each_process_exists(profile: str) -> None:
    (http_port,) = texts(xml(SERVER_XML), "http_port")
    accounts = {account.tag for account in xml(USERS_XML).iterfind("users/*")}
    servers = [one for name, one in services(profile).items() if name.startswith("clickhouse")]

    assert len(stores(profile)) == {"single": 2, "cluster": 3}[profile]
    for url in stores(profile).values():
        location = parse_store_url(url)
        assert isinstance(location, ServerLocation)
        assert location.host in names_in(profile)
        assert location.port == int(http_port)
        assert location.user in accounts
        # The server creates it at its start. The image would start another server to create it,
        # which answers health checks and ends.
        assert texts(xml(SERVER_XML), "default_database") == [location.database]
        for server in servers:
            assert "CLICKHOUSE_DB" not in server["environment"]
        assert (location.cluster is not None) == (profile == "cluster")
        if location.cluster is not None:
            assert xml(CLUSTER_XML).find(f"remote_servers/{location.cluster}") is not None


def test_every_server_is_the_shard_and_replica_of_the_clusters_file() -> None:
    shards = [
        texts(shard, "replica/host")
        for shard in xml(CLUSTER_XML).iterfind("remote_servers/rankscope/shard")
    ]
    (native,) = texts(xml(SERVER_XML), "tcp_port")

    assert [len(replicas) for replicas in shards] == [2, 2]
    for shard, replicas in enumerate(shards, start=1):
        for replica, host in enumerate(replicas, start=1):
            service = services("cluster")[host]
            assert service["hostname"] == host
            where = service["environment"]["SHARD"], service["environment"]["REPLICA"]
            assert where == (str(shard), str(replica))
    ports = texts(xml(CLUSTER_XML), "remote_servers/rankscope/shard/replica/port")
    assert set(ports) == {native}
    replication = texts(xml(CLUSTER_XML), "remote_servers/rankscope/shard/internal_replication")
    assert replication == [
        "true",
        "true",
    ]  # otherwise the engine would write each row to both replicas itself


def test_keepers_and_servers_have_the_addresses_of_all_keepers() -> None:
    keepers = dict(
        zip(
            texts(xml(KEEPER_XML), "keeper_server/raft_configuration/server/id"),
            texts(xml(KEEPER_XML), "keeper_server/raft_configuration/server/hostname"),
            strict=True,
        )
    )
    running = {
        one["environment"]["KEEPER"]: one["hostname"]
        for name, one in services("cluster").items()
        if name.startswith("keeper")
    }

    assert keepers == running
    assert texts(xml(CLUSTER_XML), "zookeeper/node/host") == list(running.values())
    (port,) = texts(xml(KEEPER_XML), "keeper_server/tcp_port")
    assert set(texts(xml(CLUSTER_XML), "zookeeper/node/port")) == {port}
    assert all(port in services()[name]["healthcheck"]["test"][-1] for name in running.values())


@pytest.mark.multiproc
@pytest.mark.parametrize(("answer", "status"), [(b"imok", 0), (b"", 1)])
def test_a_keeper_is_healthy_if_it_says_so(answer: bytes, status: int) -> None:
    (port,) = texts(xml(KEEPER_XML), "keeper_server/tcp_port")
    _, *command = services("cluster")["keeper-1"]["healthcheck"]["test"]
    with socket.create_server(("127.0.0.1", 0)) as keeper:
        command[-1] = command[-1].replace(port, str(keeper.getsockname()[1]))

        def serve() -> None:
            client, _ = keeper.accept()
            with client:
                assert client.recv(16) == b"ruok\n"
                client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        done = subprocess.run(command, timeout=60, check=False)
        thread.join()

    assert done.returncode == status


def test_the_environment_has_the_variables_that_configurations_read() -> None:
    checked = 0
    for name, service in services().items():
        for source in mounts(service):
            path = ROOT / source
            if path.suffix != ".xml":
                continue
            root = Xml.fromstring(path.read_text(encoding="utf-8"))
            wanted = {one.attrib["from_env"] for one in root.iter() if "from_env" in one.attrib}
            assert wanted <= set(service["environment"]), name
            checked += len(wanted)
    assert checked == 1 * 2 + 4 * 5 + 3 * 1


def command_of(service: dict[str, Any]) -> tuple[str, dict[str, str]]:
    program, name, *flags = service["command"]
    assert program == "rankscope"
    return name, dict(flag.split("=", 1) for flag in flags)


@pytest.mark.parametrize(
    "name", ["collector", "dashboard", "collector-1", "collector-2", "cluster-dashboard"]
)
def test_the_commands_and_their_flags_exist_and_name_files_that_are_mounted(name: str) -> None:
    service = services()[name]
    command, flags = command_of(service)
    known = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]

    assert set(flags) <= {option for parameter in known.params for option in parameter.opts}
    assert flags["--only"] == ("dashboard" if "dashboard" in name else "collector")
    made = PREPARE.read_text(encoding="utf-8")
    for flag in ("--tls-cert", "--tls-key"):
        folder, _, file = flags[flag].rpartition("/")
        assert folder in mounts(service).values()
        assert f"$secrets/tls/{file}" in made
    assert service["environment"]["PORT"] == flags["--port"]  # the port of the health check


def test_tokens_are_made_by_a_container_where_the_collector_reads_them() -> None:
    token, collector = services()["token"], services()["collector"]

    assert token["entrypoint"] == ["rankscope", "token"]
    path = token["environment"]["RANKSCOPE_TOKENS"]
    assert path == collector["environment"]["RANKSCOPE_TOKENS"]
    assert mounts(token) == {"./deploy/secrets/tokens": path.rpartition("/")[0]}
    assert "./deploy/secrets/tokens" in mounts(collector)


@pytest.mark.parametrize("profile", PROFILES)
def test_prometheus_scrapes_each_collector_and_dashboard_of_its_profile(profile: str) -> None:
    (service,) = (one for name, one in services(profile).items() if "prometheus" in name)
    mounted = mounts(service)
    targets = next(source for source, target in mounted.items() if target.endswith("targets.json"))
    scraped = json.loads((ROOT / targets).read_text())[0]["targets"]
    own = {
        f"{name}:{one['environment']['PORT']}"
        for name, one in services(profile).items()
        if one.get("command", [""])[0] == "rankscope"
    }
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    job = config["scrape_configs"][0]

    assert set(scraped) == own
    # The certificate is for the name that is scraped, and the server checks the host of a request.
    assert {name.partition(":")[0] for name in scraped} <= set(
        re.findall(r"[\w-]+", PREPARE.read_text().partition("names=(")[2].partition('"')[0])
    )
    assert job["tls_config"]["ca_file"] in mounted.values()
    assert job["authorization"]["credentials_file"].startswith("/tokens/")
    assert config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] == [
        "alertmanager:9093"
    ]


def test_alerts_go_to_the_alertmanager_of_the_deployment() -> None:
    for name in ("dashboard", "cluster-dashboard"):
        assert command_of(services()[name])[1]["--alert-webhook"] == (
            "http://alertmanager:9093/api/v2/alerts"
        )
    assert services()["alertmanager"]["ports"] == ["127.0.0.1:9093:9093"]


def test_grafana_installs_one_version_of_its_plugin() -> None:
    (plugin,) = services()["grafana"]["environment"]["GF_PLUGINS_PREINSTALL_SYNC"].split(",")

    assert re.fullmatch(r"grafana-clickhouse-datasource@\d+\.\d+\.\d+", plugin)


def test_the_bases_of_the_image_are_pinned_and_of_one_debian() -> None:
    recipe = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", recipe, re.MULTILINE))
    bases = set(re.findall(r"^FROM (\S+)", recipe, re.MULTILINE)) - stages

    assert len(bases) == 2
    assert all(PINNED.fullmatch(base) for base in bases)
    # The compiled part of one runs in the other.
    assert all("-bookworm@" in base for base in bases)


def test_the_image_copies_every_package_and_only_existing_files() -> None:
    recipe = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    copied = {
        name
        for line in re.findall(r"^COPY (?!--from)(.+)$", recipe, re.MULTILINE)
        for name in shlex.split(line)[:-1]
    }
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()

    assert packages <= copied
    assert "*" in ignored  # keys and passwords are not sent to the builder
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
    assert all((ROOT / name).exists() for name in copied)
    assert compose()["x-rankscope"]["build"]["dockerfile"] == "deploy/Dockerfile"


def test_the_image_has_the_target_of_each_link_that_it_copies() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [ROOT / line[1:] for line in ignored if line.startswith("!")]
    links = [
        path
        for folder in copied
        if folder.is_dir()
        for path in folder.rglob("*")
        if path.is_symlink()
    ]

    assert links
    for link in links:
        assert any(link.resolve().is_relative_to(place) for place in copied), link

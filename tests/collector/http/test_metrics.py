from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rankscope.collector.http.access import Access
from rankscope.collector.http.application import create_server
from rankscope.collector.http.metrics import Metrics, Reading, route_label
from tests.collector.http.test_login import pages
from tests.support.collector.asgi import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = "correct-horse"
BEARER = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def client(metrics: Metrics) -> Client:
    access = Access(port=8050, token=TOKEN)
    return Client(create_server(access, pages=pages, not_ready=lambda: None, metrics=metrics))


def scraped(client: Client) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = client.get("/metrics", headers=BEARER)
    assert answer.status_code == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_requests_are_counted_by_route_method_and_status(client: Client) -> None:
    client.get("/timeline?run=a", headers=BEARER)
    client.get("/timeline")
    client.get("/run/7b", headers=BEARER)
    found = scraped(client)

    def requests(route: str, status: str) -> float:
        labels = (("method", "GET"), ("route", route), ("status", status))
        return found["rankscope_http_requests_total", labels]

    assert requests("pages", "200") == 2
    assert requests("pages", "401") == 1
    assert found["rankscope_http_request_duration_seconds_count", (("route", "pages"),)] == 3
    assert ("process_open_fds", ()) in found


def test_the_number_of_series_is_bounded_for_any_requests(client: Client) -> None:
    before = len(scraped(client))
    for number in range(60):
        client.get(f"/run/r{number}", headers=BEARER)
        client.get(f"/v1/rows/t{number}", headers=BEARER)
        client.get(f"/v1/x{number}", headers=BEARER)
        client.request(f"BREW{number}", "/", headers=BEARER)
    many = len(scraped(client))

    # 240 paths and methods give five new routes: 11 series of time and 2 to 4 counts each.
    assert many - before <= 5 * (11 + 4)


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/clock", "/v1/clock"),
        ("/v1/rows/ranks", "/v1/rows"),
        ("/v1/rows/", "/v1/rows"),
        ("/v1/anything", "unknown"),
        ("/assets/a.css", "static"),
        ("/run/x", "pages"),
        ("", "pages"),
    ],
)
def test_a_path_has_one_of_few_labels(path: str, route: str) -> None:
    assert route_label(path) == route


def test_readers_are_called_at_each_scrape(client: Client, metrics: Metrics) -> None:
    cuts = {"stored": 1.0}

    def read() -> Iterator[Reading]:
        yield Reading(name="cuts_total", text="Cuts.", label="state", values=cuts)
        yield Reading(name="up", text="Up.", values={"": 1})

    metrics.add(read)
    assert scraped(client)["rankscope_cuts_total", (("state", "stored"),)] == 1
    cuts["stored"] = 3
    found = scraped(client)

    assert found["rankscope_cuts_total", (("state", "stored"),)] == 3
    assert found["rankscope_up", ()] == 1

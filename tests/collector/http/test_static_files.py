from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.http.access import Access
from rankscope.collector.http.application import PAGE_THREADS, create_server
from rankscope.collector.http.static_files import StaticFiles
from tests.support.collector.asgi import Client
from tests.support.collector.running_server import LARGE, read_to_end, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rankscope.collector.http.requests import Message, Receive, Scope, Send

TOKEN = "correct-horse"
ETAG = b'"5-1"'


class Files:
    """Application with files that records the requests."""

    def __init__(self, **bodies: bytes) -> None:
        self.bodies = bodies
        self.asked: list[tuple[str, str]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append((scope["method"], scope["path"]))
        message: Message = {"more_body": True}
        while message.get("more_body"):
            message = await receive()
        body = self.bodies.get(scope["path"].rpartition("/")[2])
        headers = [
            (b"content-type", b"text/css"),
            (b"etag", ETAG),
            (b"cache-control", b"no-cache"),
            (b"date", b"today"),
        ]
        status = 404 if body is None else 200
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body or b"no", "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def files() -> Files:
    return Files(a=b"aaaaa", b=b"bbbbb", copy=b"aaaaa", large=b"x" * 200_000)


def kept(files: Files, *, max_bytes: int = 2**20, max_paths: int = 10) -> Client:
    return Client(
        StaticFiles(files, prefixes=("/assets/",), max_bytes=max_bytes, max_paths=max_paths)
    )


def test_a_file_is_requested_once_and_answered_unchanged(files: Files) -> None:
    client = kept(files)
    answers = [client.get("/assets/large", params={"m": str(one)}) for one in range(3)]

    assert files.asked == [("GET", "/assets/large")]
    for answer in answers:
        assert answer.status_code == 200
        assert answer.content == b"x" * 200_000
        assert dict(answer.headers) == {
            "content-type": "text/css",
            "etag": ETAG.decode(),
            "cache-control": "public, max-age=31536000, immutable",
            "content-encoding": "gzip",
            "vary": "Accept-Encoding",
            "content-length": "229",
        }


def test_a_head_request_caches_the_whole_file(files: Files) -> None:
    client = kept(files)
    head = client.request("HEAD", "/assets/a")

    assert (head.content, head.headers["content-length"]) == (b"", "5")
    assert client.get("/assets/a").content == b"aaaaa"
    assert files.asked == [("GET", "/assets/a")]


@pytest.mark.parametrize(
    ("held", "status"),
    [('"5-1"', 304), ('W/"5-1"', 304), ('"x", "5-1"', 304), ('"5"', 200), ("", 200)],
)
def test_a_client_with_the_same_etag_gets_304(files: Files, held: str, status: int) -> None:
    answer = kept(files).get("/assets/a", headers={"if-none-match": held})

    assert answer.status_code == status
    assert answer.content == (b"" if status == 304 else b"aaaaa")
    assert answer.headers["etag"] == ETAG.decode()


def test_errors_are_not_cached(files: Files) -> None:
    client = kept(files)
    assert [client.get("/assets/none").status_code for _ in range(2)] == [404, 404]
    assert len(files.asked) == 2


def test_other_requests_are_passed_on(files: Files) -> None:
    client = kept(files)
    for _ in range(2):
        client.get("/a")
        client.post("/assets/a")
    assert files.asked == [("GET", "/a"), ("POST", "/assets/a")] * 2


def test_files_beyond_the_size_limit_are_answered_and_not_cached(files: Files) -> None:
    # A limit of 5 bytes fits one content, under any number of names.
    client = kept(files, max_bytes=9)
    for _ in range(2):
        assert [client.get(f"/assets/{name}").text for name in ("a", "copy", "b")] == [
            "aaaaa",
            "aaaaa",
            "bbbbb",
        ]
    asked = [path for _, path in files.asked]
    assert asked == ["/assets/a", "/assets/copy", "/assets/b", "/assets/b"]


def test_files_beyond_the_path_limit_are_answered_and_not_cached(files: Files) -> None:
    client = kept(files, max_paths=1)
    for _ in range(2):
        assert client.get("/assets/a").text == "aaaaa"
        assert client.get("/assets/b").text == "bbbbb"
    assert [path for _, path in files.asked] == ["/assets/a", "/assets/b", "/assets/b"]


def pages(environ: dict[str, str], start_response: Callable[..., object]) -> Iterable[bytes]:
    """A page, and below ``/assets/`` files larger than socket buffers."""
    start_response("200 OK", [("Content-Type", "text/plain")])
    if environ["PATH_INFO"].startswith("/assets/"):
        return [b"x" * 2**16] * 256
    return [b"a page"]


def test_slow_readers_of_static_files_do_not_block_the_pages() -> None:
    app = create_server(Access(port=0, token=TOKEN), pages=pages, not_ready=lambda: None)
    with running(app, limits=LARGE) as server, ExitStack() as stack:
        for _ in range(2 * PAGE_THREADS):
            slow_client = stack.enter_context(server.connect())
            slow_client.sendall(b"GET /assets/plotly.js HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert slow_client.recv(8) == b"HTTP/1.1"  # reads no more than this
        with server.connect() as connection:
            connection.sendall(
                b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
                b"authorization: Bearer " + TOKEN.encode() + b"\r\n\r\n"
            )
            assert read_to_end(connection).endswith(b"a page\r\n0\r\n\r\n")


def test_a_file_is_compressed_once_for_clients_that_accept_it(files: Files) -> None:
    client = kept(files)

    packed = client.get("/assets/large", headers={"accept-encoding": "gzip"})
    plain = client.get("/assets/large", headers={"accept-encoding": "gzip;q=0"})
    short = client.get("/assets/a", headers={"accept-encoding": "gzip"})

    assert packed.content == plain.content == b"x" * 200_000
    assert int(packed.headers["content-length"]) < 2_000
    assert (packed.headers["content-encoding"], packed.headers["vary"]) == (
        "gzip",
        "Accept-Encoding",
    )
    assert "content-encoding" not in plain.headers
    assert "content-encoding" not in short.headers
    assert len(files.asked) == 2


def test_a_file_whose_address_has_its_time_is_kept_by_the_browser(files: Files) -> None:
    client = kept(files)

    assert client.get("/assets/a?m=17").headers["cache-control"].endswith("immutable")
    assert client.get("/assets/a").headers["cache-control"] == "no-cache"

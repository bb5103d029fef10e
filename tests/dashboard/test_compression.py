from __future__ import annotations

import gzip
import json

from flask import Flask, jsonify

from rankscope.dashboard.app import compress_large

LARGE = {"z": "A" * 100_000}


def served() -> Flask:
    """Return a server with a large document, a small one, and a large text."""
    server = Flask("test")
    compress_large(server)
    server.add_url_rule("/large", "large", lambda: jsonify(LARGE))
    server.add_url_rule("/small", "small", lambda: jsonify({"z": 1}))
    server.add_url_rule("/text", "text", lambda: "A" * 100_000)
    return server


def test_a_large_document_is_compressed_for_a_client_that_accepts_it() -> None:
    answer = served().test_client().get("/large", headers={"Accept-Encoding": "gzip, br"})

    assert answer.headers["Content-Encoding"] == "gzip"
    assert answer.headers["Vary"] == "Accept-Encoding"
    assert int(answer.headers["Content-Length"]) == len(answer.data) < 2_000
    assert json.loads(gzip.decompress(answer.data)) == LARGE


def test_other_responses_are_not_compressed() -> None:
    client = served().test_client()

    assert client.get("/large").get_json() == LARGE
    for path in ("/small", "/text"):
        answer = client.get(path, headers={"Accept-Encoding": "gzip"})
        assert "Content-Encoding" not in answer.headers

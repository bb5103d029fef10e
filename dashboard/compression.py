"""Compress large answers: a picture of 512 lines is 640 kB as it stands, and 30 to 70 kB packed."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

from flask import request

if TYPE_CHECKING:
    from flask import Flask, Response

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

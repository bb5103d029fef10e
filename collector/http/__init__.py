"""The edge of the server: TLS, deadlines, caps, throttles, and what it tells of them."""

"""HTTP server: access control, TLS, limits, and the routes that other packages add."""

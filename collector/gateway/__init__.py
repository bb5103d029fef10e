"""Gateway: read-only ClickHouse protocol over HTTP for the embedded store."""

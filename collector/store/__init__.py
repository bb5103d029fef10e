"""The ClickHouse store: connection, schema, and writing each row once."""

"""Read the embedded store from outside, as a ClickHouse server that only answers questions."""

"""The collector's ingest service: what agents send comes in here."""

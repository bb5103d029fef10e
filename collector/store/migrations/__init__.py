"""The store's schema, one numbered SQL file a version."""

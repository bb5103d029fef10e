"""Use of an embedded store through the server process that holds it."""

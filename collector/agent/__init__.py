"""The agent: sends the spool of a host to a collector over HTTP."""

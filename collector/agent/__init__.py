"""The node agent: ships what the ranks of one host write to a collector over HTTP."""

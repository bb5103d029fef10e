"""Active tests: what devices, links and hosts achieve, compared with their peers."""

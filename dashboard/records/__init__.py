"""Records that pages show beside the report: what a provider returns."""

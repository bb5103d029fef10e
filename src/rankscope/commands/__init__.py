"""Subcommands of `rankscope`: flags, a call, printed output."""

"""The input of analysis: tables, context, devices, errors."""

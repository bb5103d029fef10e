"""Time work on the device: event pairs, resolved later, on the host's clock."""

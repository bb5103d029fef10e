"""Where the time of a step goes: waterfall, waiting, bubble, MFU, bandwidth."""

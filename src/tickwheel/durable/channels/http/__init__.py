"""The HTTP channel, and the checks of the addresses that it calls."""

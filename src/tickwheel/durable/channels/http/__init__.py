"""The HTTP channel, and the guard that decides which addresses it may call."""

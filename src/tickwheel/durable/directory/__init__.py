"""The directory: services and tokens, in the store and in memory."""

"""The channels: each fulfils the contract in `channel`."""

"""The coordinators: each fulfils the contract in `coordinator`."""

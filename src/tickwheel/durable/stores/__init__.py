"""The stores: each fulfils the contract in `store`."""

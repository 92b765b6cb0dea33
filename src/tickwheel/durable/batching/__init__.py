"""Batching: several requests in one transaction."""

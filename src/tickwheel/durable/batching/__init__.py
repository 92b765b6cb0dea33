"""Batching: storing several requests in one transaction."""

"""Permits: how many calls may begin, and what they may hold."""

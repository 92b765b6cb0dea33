"""Permits: how many calls may start, and how much memory they may use."""

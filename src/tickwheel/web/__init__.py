"""The JSON API: parse a request, call a verb of the scheduler, render its result."""

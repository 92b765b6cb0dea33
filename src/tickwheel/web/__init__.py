"""The JSON API and the dashboard: parse a request, call a verb of the scheduler, render its result.

`dashboard(scheduler)` is an ASGI application to mount; it is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tickwheel.web.embedded import dashboard

__all__ = ["dashboard"]


def __getattr__(name: str) -> Any:
    if name == "dashboard":
        from tickwheel.web.embedded import dashboard  # noqa: PLC0415 - imports the whole API

        return dashboard
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

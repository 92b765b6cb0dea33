"""A Django app: one scheduler for the project, `manage.py tickwheel`, and a page of the admin.

Add "tickwheel.django" to INSTALLED_APPS. Needs `pip install 'tickwheel[django]'`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tickwheel.django.project import scheduler, submit_on_commit

__all__ = ["scheduler", "submit_on_commit"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from tickwheel.django import project  # noqa: PLC0415 - needs Django's settings

        return getattr(project, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Another name of `tickwheel.overflow_buffers`."""

from __future__ import annotations

from typing import Any

from tickwheel import overflow_buffers

__all__ = overflow_buffers.__all__


def __getattr__(name: str) -> Any:
    return getattr(overflow_buffers, name)

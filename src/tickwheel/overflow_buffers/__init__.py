"""Overflow buffers in databases; each fulfils the contract in `tickwheel.overflow`.

The first access to a buffer imports it and the driver of its database.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tickwheel.overflow_buffers.postgres import PostgresBuffer
    from tickwheel.overflow_buffers.redis import RedisBuffer
    from tickwheel.overflow_buffers.sqlite import SqliteBuffer

__all__ = ["PostgresBuffer", "RedisBuffer", "SqliteBuffer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{name.removesuffix('Buffer').lower()}")
    return getattr(module, name)

"""The logger `tickwheel`, for steps that must not fail because of a log message."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import MutableMapping


class SafeLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that never raises: a handler may be broken, stderr may be closed."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Keep the caller's `extra`, which the base class would replace."""
        return msg, kwargs

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message; ignore a failure."""
        kwargs.setdefault("stacklevel", 3)
        with suppress(Exception):
            super().log(level, msg, *args, **kwargs)


logger = SafeLogger(logging.getLogger("tickwheel"), {})

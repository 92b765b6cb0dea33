"""A small HTTP/1.1 client for asyncio.

    pool = Pool()
    response = await pool.request("POST", "https://shop.example/hook", body=b"{}", timeout=30)
    await pool.close()

It follows no redirects, keeps no cookies, reads no proxy from the environment and decompresses
nothing: a response is what the server sent. It knows nothing about tasks.
"""

from tickwheel.http.connect import Address, OpenConnections
from tickwheel.http.errors import (
    BadAnswer,
    ConnectFailed,
    HttpError,
    NoRoom,
    NotSent,
    TimedOut,
    Unanswered,
)
from tickwheel.http.message import Response
from tickwheel.http.pool import Pool

__all__ = [
    "Address",
    "BadAnswer",
    "ConnectFailed",
    "HttpError",
    "NoRoom",
    "NotSent",
    "OpenConnections",
    "Pool",
    "Response",
    "TimedOut",
    "Unanswered",
]

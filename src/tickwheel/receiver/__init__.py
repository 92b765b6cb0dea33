"""The receiver, for programs that a server calls: verifies each call, handles each task once.

    receiver = Receiver(os.environ["TICKWHEEL_WEBHOOK_SECRET"])

    async def close_order(delivery):
        ...delivery.payload...

    app = Starlette(routes=[Route("/hook", receiver.starlette(close_order), methods=["POST"])])

For FastAPI `app.post("/hook")(receiver.starlette(close_order))`, for Flask
`app.post("/hook")(receiver.flask(close_order))`; anything else: `receiver.answer(...)`. For the
messages of a queue: `receiver.consume(...)`.
"""

from tickwheel.receiver.core import (
    Accepted,
    BadDelivery,
    Delivery,
    Gone,
    InProgress,
    Receiver,
    Reply,
)
from tickwheel.receiver.dedupe import MemorySeen, Seen
from tickwheel.receiver.messages import Settlement
from tickwheel.values.outcome import Retry
from tickwheel.values.signature import InvalidSignature

__all__ = [
    "Accepted",
    "BadDelivery",
    "Delivery",
    "Gone",
    "InProgress",
    "InvalidSignature",
    "MemorySeen",
    "Receiver",
    "Reply",
    "Retry",
    "Seen",
    "Settlement",
]

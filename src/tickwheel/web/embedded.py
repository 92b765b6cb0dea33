"""The dashboard and the API of a scheduler in the user's own process, as an ASGI application.

ASGI does not tell an application that its server stops: uvicorn waits for the open responses before
it ends the lifespan, and a stream of figures would never end. So streams end when uvicorn has begun
to stop, or when the scheduler has; for other servers, each stream ends after a while, and the page
opens another one.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from tickwheel.web.access import Guard
from tickwheel.web.app import App

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, MutableMapping

    from tickwheel.durable.scheduler import Scheduler

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]

STREAM_SECONDS = 60.0  # the longest that a stream keeps a server from stopping
STOPPED = b"the scheduler is not running\n"


def dashboard(
    scheduler: Scheduler, *, open_access: bool = False, hosts: Iterable[str] = ()
) -> EmbeddedDashboard:
    """Return an ASGI application to mount, with the dashboard at its root and the API below `/v1`.

    - The scheduler is started and stopped by its owner, on the event loop that serves requests.
    - A request needs a token of the store. `open_access`: it needs none, because your application
      admits only those who may do everything.
    - `hosts`: the names of your site, such as "jobs.example.com:8000". Without a token, the host
      header must be one of them, an address, or a name without a dot.
    """
    return EmbeddedDashboard(scheduler, open_access=open_access, hosts=hosts)


class EmbeddedDashboard:
    """The API and the dashboard of whatever node the scheduler runs now."""

    def __init__(self, scheduler: Scheduler, *, open_access: bool, hosts: Iterable[str]) -> None:
        self._scheduler = scheduler
        self._open_access = open_access
        self._hosts = frozenset(name.lower().encode() for name in hosts)
        self._app: App | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request; answer 503 while the scheduler does not run."""
        if scope["type"] == "lifespan":
            raise RuntimeError("mount the dashboard: your application has its own lifespan")
        if not self._scheduler.running:
            if self._app is not None:
                self._app.live.close()
            headers = [(b"content-type", b"text/plain"), (b"retry-after", b"1")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": STOPPED})
            return
        await self._current()(scope, receive, send)

    def _current(self) -> App:
        """Return the application of the running node; a restart of the scheduler makes another."""
        node = self._scheduler.node
        if self._app is None or self._app.node is not node:
            if self._app is not None:
                self._app.live.close()
            guard = Guard(node.directory, local=False, open_access=self._open_access, rate=None)
            self._app = EmbeddedApp(self._scheduler, guard, loopback_only=False, hosts=self._hosts)
            self._app.live.lifetime = STREAM_SECONDS
        return self._app


class EmbeddedApp(App):
    """The API of one run of a scheduler, in a server that is not ours."""

    def ending(self) -> bool:
        """Return whether the scheduler was stopped, or the server stops."""
        scheduler = self.scheduler
        return not scheduler.running or scheduler.node is not self.node or uvicorn_stops()


def uvicorn_stops() -> bool:
    """Return whether uvicorn, in this process, has received a signal to stop."""
    handlers = map(signal.getsignal, (signal.SIGTERM, signal.SIGINT))
    return any(getattr(getattr(one, "__self__", None), "should_exit", False) for one in handlers)

"""A session with ZooKeeper for one event loop: kazoo's calls as awaitables, bounded in time.

kazoo works on its own threads, and reports the loss of a session only after it has reconnected. So
only the answers to calls count here. Its threads also keep a session alive whatever the event loop
does: without a call of `beat` for as long as the timeout, the session is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any

from kazoo.client import KazooClient
from kazoo.exceptions import (
    ConnectionClosedError,
    KazooException,
    NodeExistsError,
    NoNodeError,
)
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.security import make_digest_acl

from tickwheel.clock import SystemClock
from tickwheel.durable.coordinator import CoordinatorUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from tickwheel.values.zookeeper_url import ZooKeeperUrl


class Session:
    """One session; `seconds` is its timeout, which the server may change.

    - Paths are relative to the root of the URL.
    - `NoNodeError` and `NodeExistsError` are raised as they are, everything else as
      `CoordinatorUnavailable`.
    """

    def __init__(self, url: ZooKeeperUrl, seconds: float) -> None:
        self._url = url
        self._loop = asyncio.get_running_loop()
        user, _, password = url.credentials.partition(":")
        acl = [make_digest_acl(user, password, all=True)] if user else None
        self._client = KazooClient(
            url.hosts, timeout=seconds, default_acl=acl, use_ssl=url.tls, check_hostname=url.tls,
            auth_data=[("digest", url.credentials)] if user else None, **url.files,
        )  # fmt: skip
        self.seconds = seconds
        self._clock = SystemClock()
        self._beaten_at = self._clock.time()
        self._id = 0
        self._closed = threading.Event()
        self._watchers: dict[Callable[[], None], Callable[[Any], None]] = {}
        self._note_timeout()

    def _note_timeout(self) -> None:
        """Set `seconds` to the timeout that the server has agreed to; kazoo only logs it."""
        connection = self._client._connection
        connect = connection._connect

        def noting(*args: Any, **options: Any) -> tuple[float, float]:
            read_timeout, connect_timeout = connect(*args, **options)
            self.seconds = read_timeout * 1.5 / 1000
            return read_timeout, connect_timeout

        connection._connect = noting

    async def open(self, seconds: float) -> None:
        """Connect, and create the root."""
        self._client.start_async()
        threading.Thread(target=self._watch_loop, name="tickwheel-zookeeper", daemon=True).start()
        try:
            async with asyncio.timeout(seconds):
                while not self._client.connected:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise CoordinatorUnavailable(
                f"ZooKeeper at {self._url.hosts} does not answer"
            ) from None
        await self.call("ensure_path", "")

    def beat(self) -> None:
        """Keep the session: the event loop works."""
        self._beaten_at = self._clock.time()

    @property
    def closed(self) -> bool:
        """Whether it was closed, or ended because nothing called `beat`."""
        return self._closed.is_set()

    def _watch_loop(self) -> None:
        while not self._closed.wait(self.seconds / 4):
            if self._clock.time() - self._beaten_at > self.seconds:
                self._close()

    def _close(self) -> None:
        self._closed.set()
        with contextlib.suppress(Exception):
            self._client.stop()
        with contextlib.suppress(Exception):
            self._client.close()

    @property
    def id(self) -> int:
        """The id of the current session, which owns its ephemeral nodes; 0: there was none yet.

        Without a connection it is the last one: kazoo then tells none, but it may live on.
        """
        if client_id := self._client.client_id:
            self._id = client_id[0]
        return self._id

    def path(self, name: str) -> str:
        """Return the full path of a name below the root."""
        return f"{self._url.root}/{name}".rstrip("/")

    async def call(self, method: str, name: str, *args: Any, **options: Any) -> Any:
        """Call one of kazoo's methods on a path, and return its answer."""
        call = getattr(self._client, f"{method}_async")
        return await self._answer(lambda: call(self.path(name), *args, **options))

    async def data(self, name: str, watch: Callable[[], None] | None = None) -> bytes | None:
        """Return the data of a node, or None; `watch()` is called when that changes."""
        options = {} if watch is None else {"watch": self._watcher(watch)}
        try:
            data, _ = await self.call("get", name, **options)
        except NoNodeError:
            if watch is None or await self.call("exists", name, **options) is None:
                return None
            return await self.data(name, watch)
        return bytes(data)

    async def children(self, name: str, watch: Callable[[], None] | None = None) -> list[str]:
        """Return the names of a node's children, sorted; `watch()` is called when they change."""
        options = {} if watch is None else {"watch": self._watcher(watch)}
        try:
            return sorted(await self.call("get_children", name, **options))
        except NoNodeError:
            return []

    async def exists(self, name: str, watch: Callable[[], None] | None = None) -> bool:
        """Return whether a node exists; `watch()` is called when it is deleted."""
        options = {} if watch is None else {"watch": self._watcher(watch)}
        return await self.call("exists", name, **options) is not None

    def transaction(self) -> Any:
        """Return a transaction, to fill and to `commit`."""
        return self._client.transaction()

    async def commit(self, transaction: Any) -> None:
        """Commit a transaction, all or nothing."""
        for result in await self._answer(transaction.commit_async):
            if isinstance(result, Exception):
                raise CoordinatorUnavailable(
                    f"ZooKeeper has refused a transaction: {result!r}"
                ) from result

    async def close(self) -> None:
        """End the session; its ephemeral nodes go with it."""
        if not self.closed:
            await asyncio.to_thread(self._close)

    def abandon(self) -> None:
        """Close it without waiting: its threads may hang."""
        if not self.closed:
            self._closed.set()
            threading.Thread(target=self._close, name="tickwheel-zookeeper", daemon=True).start()

    def _watcher(self, watch: Callable[[], None]) -> Callable[[Any], None]:
        def fired(event: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(watch)

        return self._watchers.setdefault(watch, fired)

    async def _answer(self, call: Callable[[], Any]) -> Any:
        future: asyncio.Future[Any] = self._loop.create_future()

        def settle(result: Any) -> None:
            if future.done():
                return
            if result.exception is not None:
                future.set_exception(result.exception)
            else:
                future.set_result(result.value)

        def answered(result: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(settle, result)

        try:
            call().rawlink(answered)
            async with asyncio.timeout(max(1.0, self.seconds / 2)):
                return await future
        except (NoNodeError, NodeExistsError):
            raise
        except (KazooException, KazooTimeoutError, TimeoutError) as error:
            if isinstance(error, ConnectionClosedError):
                self.abandon()  # kazoo's thread has ended
            reason = str(error) or type(error).__name__
            raise CoordinatorUnavailable(f"ZooKeeper at {self._url.hosts}: {reason}") from error

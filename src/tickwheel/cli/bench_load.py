"""The load of `bench`: submits over many connections at once, with the time of each."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from tickwheel.client.errors import ServerUnavailable, error_of
from tickwheel.http import HttpError, Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Self

TIMEOUT_SECONDS = 30.0
STORED = re.compile(rb'"stored":\s*(\d+),\s*"refused":\s*\d+\s*}\s*$')


class Load(NamedTuple):
    """The result of a load: tasks acknowledged and refused, total seconds, seconds per request."""

    done: int
    refused: int
    seconds: float
    times: list[float]

    @property
    def rate(self) -> float:
        """Tasks acknowledged per second."""
        return self.done / self.seconds if self.seconds else 0.0


class Server:
    """A server under load: raw requests, without the client's retries.

    - `ask` prepares and cleans up; it raises when the server refuses.
    - `drive` sends bodies as fast as answers come, for a limited time, and counts.
    """

    def __init__(
        self,
        url: str,
        headers: Iterable[tuple[str, str]],
        connections: int,
        now: Callable[[], float],
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = [*headers, ("content-type", "application/json")]
        self._connections = connections
        self._pool = Pool(connections=connections, max_body=64 << 20)
        self._now = now

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()

    async def ask(self, method: str, path: str, document: object = None) -> Any:
        """Send one request and return the answer's JSON."""
        body = b"" if document is None else json.dumps(document).encode()
        try:
            answer = await self._pool.request(
                method, self._url + path, headers=self._headers, body=body, timeout=TIMEOUT_SECONDS
            )
        except HttpError as error:
            raise ServerUnavailable(f"{self._url}: {error}") from error
        if answer.status >= 400:
            raise error_of(_document(answer.body), answer.status)
        return json.loads(answer.body) if answer.body else None

    async def drive(self, path: str, bodies: Iterable[tuple[int, bytes]], seconds: float) -> Load:
        """POST (number of tasks, body) pairs on all connections; start none after `seconds`."""
        waiting = iter(bodies)
        started_at = self._now()
        until = started_at + seconds
        times: list[float] = []
        done = refused = 0

        async def work() -> None:
            nonlocal done, refused
            for tasks, body in waiting:  # a shared iterator: each worker takes the next body
                began = self._now()
                if began >= until:
                    return
                stored = await self._submit(path, tasks, body)
                done, refused = done + stored, refused + tasks - stored
                if stored:
                    times.append(self._now() - began)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._connections):
                group.create_task(work())
        return Load(done, refused, self._now() - started_at, times)

    async def _submit(self, path: str, tasks: int, body: bytes) -> int:
        """Send a body, and return how many of its tasks were acknowledged."""
        try:
            answer = await self._pool.request(
                "POST", self._url + path, headers=self._headers, body=body, timeout=TIMEOUT_SECONDS
            )
        except HttpError:
            return 0
        if answer.status >= 300:
            return 0
        summed = STORED.search(answer.body[-100:])  # a batch's totals; parsing it all takes longer
        return int(summed[1]) if summed else tasks


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def quantile(times: Iterable[float], share: float) -> float | None:
    """Return the time that this share of `times` did not exceed; None if `times` is empty."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None

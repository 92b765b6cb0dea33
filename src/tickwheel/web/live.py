"""Live figures for browsers: one sampler for all of them, and a bounded number of streams.

A stream is server-sent events. Each message replaces the last one of its name, so a slow reader
misses messages and costs no memory; a reader that takes none for a while is dropped. The sampler of
a namespace runs while somebody watches it, and reads the figures of the whole cluster.

- `figures`: the statistics of all nodes, rates and lateness of the last seconds
- `store`: the numbers of tasks in the store; not for one namespace
- `wheel`: the wheel alone, several times a second, if this process is the only node; not for one
  namespace
- `cluster`: nodes and owners of shards, when they change
- `due`: how many tasks are due in the next minute, hour, day and week
- `history`: rates and lateness of the last minutes, for a new reader, whose other first messages
  may be a second old
- `trouble`: why there are no figures now
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tickwheel.clock import SystemClock
from tickwheel.durable.directory.tokens import DEFAULT
from tickwheel.durable.exposition import store_counts
from tickwheel.durable.histogram import BOUNDS, Histogram
from tickwheel.errors import TickwheelError
from tickwheel.web import schemas, views
from tickwheel.web.cluster import merged_figures, own_wheel
from tickwheel.web.figures import Stats
from tickwheel.web.heat_map import SPANS, read_due
from tickwheel.web.problems import HttpError
from tickwheel.web.route import Call, Reply, Route

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tickwheel.web.app import App

MAX_STREAMS = 100  # of one process
TURN_SECONDS = 0.25  # between two messages with the wheel
TURNS = 4  # between two messages with all figures
CLUSTER_TURNS = 8  # between two reads of nodes and shards
COUNT_TURNS = 20  # between two counts of the tasks in the store
WINDOW = 10  # samples that lateness and rates cover
HISTORY = 600  # samples that a new reader gets
SILENCE_SECONDS = 15.0  # after which a comment shows that the connection works
EVENT_STREAM = b"text/event-stream; charset=utf-8"
ENDED = ("finish", "retry", "fail")  # the events whose rates are shown

encode = msgspec.json.Encoder().encode


class Sample(NamedTuple):
    """The counters of all nodes at one moment."""

    at: float
    nodes: tuple[str, ...]
    counts: dict[str, int]
    late: list[int]  # cumulative, by bound


class Watcher:
    """One stream: the messages that its reader has not taken yet, the last of each name."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.closed = False
        self._waiting: dict[str, bytes] = {}
        self._ready = asyncio.Event()

    def put(self, name: str, message: bytes) -> None:
        """Replace the message of this name."""
        self._waiting[name] = message
        self._ready.set()

    def close(self) -> None:
        """End the stream."""
        self.closed = True
        self._ready.set()

    async def take(self) -> bytes:
        """Return the waiting messages, or a comment after a time of silence."""
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                await self._ready.wait()
        except TimeoutError:
            return b":\n\n"
        self._ready.clear()
        messages, self._waiting = b"".join(self._waiting.values()), {}
        return messages


class Sampler:
    """Reads the figures for one access, and gives them to those who watch.

    - `within`: the namespace that confines its readers; None: they see the totals of all.
    """

    def __init__(self, app: App, within: str | None) -> None:
        self._app = app
        self._within = within
        self._clock = SystemClock()
        self._watchers: list[Watcher] = []
        self._latest: dict[str, bytes] = {}
        self._samples: deque[Sample] = deque(maxlen=WINDOW + 1)
        self._history: deque[list[float | None]] = deque(maxlen=HISTORY)
        self._alone = True
        self._running: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._watchers)

    def add(self, watcher: Watcher) -> None:
        """Give a new reader the history and the latest messages, and start to sample."""
        starts = self._running is None or self._running.done()
        if starts:  # what is known is of the time before: only the history still holds
            self._latest.clear()
            self._samples.clear()
        known = {"at": self._app.now_ms(), "rows": [*self._history]}
        watcher.put("history", message("history", known))
        for name, latest in self._latest.items():
            watcher.put(name, latest)
        self._watchers.append(watcher)
        if starts:
            self._running = asyncio.ensure_future(self._run())

    def remove(self, watcher: Watcher) -> None:
        """Forget a reader; the last one ends the sampling."""
        self._watchers.remove(watcher)
        if not self._watchers and self._running is not None:
            self._running.cancel()
            self._running = None

    def close(self) -> None:
        """End all streams."""
        for watcher in self._watchers:
            watcher.close()

    async def _run(self) -> None:
        turn = 0
        while not self._app.ending():
            try:
                await self._turn(turn)
                turn += 1
            except (TickwheelError, ConnectionError, TimeoutError, ValueError) as error:
                self._send("trouble", {"detail": str(error)})
                self._samples.clear()
            await asyncio.sleep(TURN_SECONDS)
        self.close()

    async def _turn(self, turn: int) -> None:
        """Send what is new."""
        now_ms = self._app.now_ms()
        if turn % TURNS:
            if self._alone and self._within is None:
                wheel = own_wheel(self._app, None)
                self._send("wheel", {"at": now_ms, "levels": wheel.levels})
            return
        self._drop_refused(now_ms)
        if not self._watchers:
            return
        call = self._call()
        stats: Stats = await merged_figures(call, Stats)
        self._alone = len(stats.by_node) == 1
        self._add_sample(stats)
        self._send("figures", self._figures(now_ms, stats))
        if (
            turn % COUNT_TURNS == 0 and self._within is None
        ):  # after the figures: with many tasks, a count takes longest
            self._send("store", await store_counts(call.app.node.store))
        if turn % CLUSTER_TURNS == 0:
            await self._send_cluster(call)
        await self._send_due(call)

    def _call(self) -> Call:
        """Return a request for the figures of the cluster, with the newest reader's token.

        Other servers must look at this namespace, which a reader may have named in its query.
        """
        newest = self._watchers[-1].call
        query = schemas.ReadFigures(scope="cluster")
        headers = dict(newest.headers)
        if self._within is not None:
            headers[b"tickwheel-namespace"] = (self._within or DEFAULT).encode()
        return Call(self._app, newest.access, {}, query, headers, newest.request_id, newest.scope)

    def _drop_refused(self, now_ms: float) -> None:
        """End the streams of tokens that were revoked or have expired."""
        for watcher in self._watchers:
            if not self._app.guard.still_admits(watcher.call.headers, now_ms):
                watcher.close()

    def _add_sample(self, stats: Stats) -> None:
        counts = {"submitted": stats.submitted}
        if stats.sent is not None and stats.ended is not None:
            counts |= {"sent": stats.sent, **{name: stats.ended.get(name, 0) for name in ENDED}}
        late = [count for _, count in stats.lateness.buckets] or [0] * (len(BOUNDS) + 1)
        nodes = tuple(row.name for row in stats.by_node if row.error is None)
        sample = Sample(self._clock.time(), nodes, counts, late)
        if self._samples and not follows(self._samples[-1], sample):
            self._samples.clear()
        self._samples.append(sample)

    def _figures(self, now_ms: float, stats: Stats) -> dict[str, Any]:
        """Return the message with all figures, and note them in the history."""
        newest = self._samples[-1]
        rates = rates_between(self._samples[-2], newest) if len(self._samples) > 1 else {}
        lateness = lateness_between(self._samples[0], newest)
        row = [rates.get(name) for name in ("submitted", "sent", *ENDED)]
        self._history.append([now_ms, *row, lateness["p50"], lateness["p99"]])
        return {"at": now_ms, "rates": rates, "lateness": lateness, "stats": stats}

    async def _send_cluster(self, call: Call) -> None:
        here = self._app.node.name
        nodes = [views.node_view(row, here) for row in await call.scheduler.nodes()]
        shards = await call.scheduler.shards()
        self._send("cluster", {"nodes": nodes, "owners": [row.owner for row in shards]})

    async def _send_due(self, call: Call) -> None:
        spans = [await read_due(call, span) for span in SPANS]
        self._send("due", spans)

    def _send(self, name: str, value: Any) -> None:
        """Send a message, unless it is the same as the last of its name."""
        new = message(name, value)
        if self._latest.get(name) == new:
            return
        self._latest[name] = new
        if name != "trouble":
            self._latest.pop("trouble", None)
        for watcher in self._watchers:
            watcher.put(name, new)


class Live:
    """The samplers, by the namespace that confines their readers."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._clock = SystemClock()
        self._samplers: dict[str | None, Sampler] = {}
        self.lifetime: float | None = None  # seconds after which a stream ends; None: never
        self.streams = 0

    async def watch(self, call: Call, limit: int | None) -> AsyncIterator[bytes]:
        """Yield messages until the reader is gone, or `limit` times."""
        within = call.access.within
        sampler = self._samplers.get(within)
        if sampler is None:
            sampler = self._samplers[within] = Sampler(self._app, within)
        watcher = Watcher(call)
        sampler.add(watcher)
        self.streams += 1
        try:
            yield b"retry: 1000\n\n"
            end = None if self.lifetime is None else self._clock.time() + self.lifetime
            while not watcher.closed and limit != 0 and (end is None or self._clock.time() < end):
                yield await watcher.take()
                limit = None if limit is None else limit - 1
        finally:
            self.streams -= 1
            sampler.remove(watcher)
            if not sampler and self._samplers.get(within) is sampler and within:
                del self._samplers[within]

    def close(self) -> None:
        """End all streams: the server stops."""
        for sampler in self._samplers.values():
            sampler.close()


def message(name: str, value: Any) -> bytes:
    """Return a server-sent event; JSON has no line feed."""
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"


def follows(earlier: Sample, later: Sample) -> bool:
    """Return whether the difference of two samples counts what happened between them."""
    return earlier.nodes == later.nodes and all(
        later.counts[name] >= count for name, count in earlier.counts.items()
    )


def rates_between(earlier: Sample, later: Sample) -> dict[str, float]:
    """Return how often each thing happened, in a second."""
    seconds = max(0.001, later.at - earlier.at)
    return {name: (later.counts[name] - n) / seconds for name, n in earlier.counts.items()}


def lateness_between(earlier: Sample, later: Sample) -> dict[str, float | None]:
    """Return percentiles of the lateness of the attempts that began between two samples."""
    histogram = Histogram()
    histogram.add(difference(later.late, earlier.late), 0.0)
    return {f"p{part}": histogram.quantile(part / 100) for part in (50, 90, 99)}


def difference(later: Sequence[int], earlier: Sequence[int]) -> list[int]:
    """Return how much each count has grown."""
    return [a - b for a, b in zip(later, earlier, strict=True)]


async def live(call: Call) -> Reply:
    """Stream the figures of the cluster as server-sent events."""
    query: schemas.WatchLive = call.query
    if call.app.ending() or call.app.live.streams >= MAX_STREAMS:
        raise HttpError("overloaded", f"a server has up to {MAX_STREAMS} streams: try again later")
    if query.namespace is not None:  # a browser's stream cannot have the header
        call.access = call.access.within_namespace(query.namespace)
    chunks = call.app.live.watch(call, query.limit)
    headers = [(b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
    return Reply(None, headers=headers, media=EVENT_STREAM, chunks=chunks)


ROUTES = [
    Route("GET", "/v1/live", live, scope="read", query=schemas.WatchLive,
          gives={200: msgspec.Raw}),
]  # fmt: skip

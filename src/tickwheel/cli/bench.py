"""`bench`: measures a running server, from the submitter's side and from the callee's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from tickwheel.cli import exits
from tickwheel.cli.frame import span
from tickwheel.cli.output import Output, examples, moment_of_ms, printing
from tickwheel.cli.remote import connected, reaching
from tickwheel.clock import SystemClock, WallClock
from tickwheel.errors import ServiceInUse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence

    from tickwheel.cli.load import Server
    from tickwheel.cli.sink import Sink

FAR = 86_400.0  # what is only submitted is due after the bench
LEAD = 2.0  # seconds by which what is called is submitted before it is due
CLEANUPS = 40  # tries, a quarter of a second apart, to delete the service


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the table; times are in seconds."""

    what: str
    count: int
    refused: int
    rate: float
    p50: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    count: int
    connections: int
    seconds: float
    batch: int
    rate: int
    host: str


@click.command(
    epilog=examples(
        "tickwheel bench",
        "tickwheel bench --count 50000 --connections 64 --seconds 20",
        "tickwheel bench --json | jq '.[] | {what, rate}'",
    )
)
@click.option(
    "--count", type=click.IntRange(1, 10_000_000), default=10_000, show_default=True,
    help="How many tasks each measurement has.",
)  # fmt: skip
@click.option(
    "--connections", type=click.IntRange(1, 1000), default=32, show_default=True,
    help="How many requests are under way at once.",
)  # fmt: skip
@click.option(
    "--seconds", type=click.FloatRange(0.5, 3600), default=15.0, show_default=True,
    help="How long each measurement takes at most.",
)  # fmt: skip
@click.option(
    "--batch", type=click.IntRange(1, 10_000), default=1000, show_default=True,
    help="Tasks in one batch.",
)  # fmt: skip
@click.option(
    "--rate", type=click.IntRange(1, 100_000), default=500, show_default=True,
    help="Callbacks due per second while lateness is measured.",
)  # fmt: skip
@click.option(
    "--sink", "host", default="127.0.0.1", show_default=True, metavar="ADDRESS",
    help="An address of this machine that the server can call.",
)  # fmt: skip
@printing
@reaching
def bench(
    *, out: Output, server: str, token: str | None, namespace: str | None, **options: Any
) -> int:
    """Measure a running server.

    It makes a service of its own, bench-…, and a sink that is called; the server must be allowed to
    call it: `tickwheel serve --allow-private-targets`. At the end, also by Ctrl-C or SIGTERM, the
    service is deleted and what is left of its tasks is cancelled; ended tasks stay in the backlog
    until they are pruned.

    Lateness is taken where the call arrives, so that both clocks must be the same.
    """
    try:
        from tickwheel.cli.load import Server  # noqa: PLC0415 - needs httptools
        from tickwheel.cli.sink import Sink  # noqa: PLC0415
    except ImportError as missing:
        raise click.ClickException(
            f"{missing}; for the bench: pip install 'tickwheel[client]'"
        ) from missing
    plan = Plan(**options)
    check(server, token, namespace)
    headers = [("authorization", f"Bearer {token}")] if token else []
    headers += [("tickwheel-namespace", namespace)] if namespace else []

    async def run() -> list[Measure]:
        stop_on_sigterm()
        now = SystemClock().time
        async with (
            Server(server, headers, plan.connections, now) as there,
            Sink(WallClock().time) as sink,
        ):
            return await Bench(plan, there, sink, WallClock().time).run()

    try:
        measures = ran(run())
    except asyncio.CancelledError:
        return exits.TERMINATED
    show(out, plan, measures)
    return exits.OK if all(measure.count for measure in measures) else exits.OTHER


def check(server: str, token: str | None, namespace: str | None) -> None:
    """Say what is wrong with where to go and as whom, as every command does."""
    try:
        connected(server, token, namespace).close()
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def ran(main: Coroutine[Any, Any, list[Measure]]) -> list[Measure]:
    """Run on the quickest loop there is."""
    try:
        import uvloop  # noqa: PLC0415 - an extra

        factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def stop_on_sigterm() -> None:
    """Let SIGTERM cancel the running task, as Ctrl-C does, so that it cleans up."""
    task = asyncio.current_task()
    assert task is not None, "called on a loop"
    with contextlib.suppress(NotImplementedError):  # Windows knows no such signal
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


class Bench:
    """The measurements, one after the other, on a service that is theirs alone."""

    def __init__(self, plan: Plan, server: Server, sink: Sink, now: Callable[[], float]) -> None:
        self._plan = plan
        self._server = server
        self._sink = sink
        self._now = now  # the time of day: due times are
        self._name = f"bench-{secrets.token_hex(4)}"

    async def run(self) -> list[Measure]:
        """Measure everything, and clean up whatever happens."""
        try:
            port = await self._sink.start(self._plan.host)
        except OSError as error:
            raise click.ClickException(f"--sink {self._plan.host}: {error.strerror}") from error
        async with self._service(port):
            measures = []
            for step in (self._single, self._batches, self._callbacks, self._lateness):
                tell(f"measuring {step.__name__.strip('_')} …")
                measures.append(await step())
            return measures

    @contextlib.asynccontextmanager
    async def _service(self, port: int) -> AsyncIterator[None]:
        host = f"[{self._plan.host}]" if ":" in self._plan.host else self._plan.host
        service = {
            "protocol": "http", "endpoint": f"http://{host}:{port}/", "timeout": 10,
            "concurrency": 256, "max_attempts": 3,
        }  # fmt: skip
        put = asyncio.ensure_future(self._server.ask("PUT", f"/v1/services/{self._name}", service))
        try:
            await asyncio.shield(put)
            yield
        finally:
            await asyncio.wait([put])  # an interrupt may come while the server is making it
            if put.exception() is None:
                tell("cleaning up …")
                await self._clean()

    async def _clean(self) -> None:
        for _ in range(CLEANUPS):
            await self._cancel()
            try:
                await self._server.ask("DELETE", f"/v1/services/{self._name}")
            except ServiceInUse:  # calls that are still under way
                await asyncio.sleep(0.25)
            else:
                return
        exits.tell_line(
            f"{self._name} has calls under way and could not be deleted; later:"
            f" tickwheel services delete {self._name}",
            word="warning:",
            colour="yellow",
        )

    async def _cancel(self) -> None:
        while (await self._server.ask("POST", "/v1/tasks/cancel", {"service": self._name}))[
            "cancelled"
        ]:
            pass

    async def _single(self) -> Measure:
        """Measure submits of one task each."""
        bodies = ((1, body) for body in self._tasks([self._now() + FAR] * self._plan.count))
        load = await self._server.drive("/v1/tasks", bodies, self._plan.seconds)
        await self._cancel()
        return self._measure("submits", load.done, load.refused, load.rate, load.times)

    async def _batches(self) -> Measure:
        """Measure submits by the batch; the times are those of a whole batch."""
        bodies = self._batched([self._now() + FAR] * self._plan.count)
        load = await self._server.drive("/v1/tasks/batch", bodies, self._plan.seconds)
        await self._cancel()
        what = f"submits in batches of {self._plan.batch:,}"
        return self._measure(what, load.done, load.refused, load.rate, load.times)

    async def _callbacks(self) -> Measure:
        """Measure how many calls per second arrive when all are due at once."""
        due_at = self._now() + LEAD
        refused = await self._due([due_at] * self._plan.count)
        await self._cancel()
        return self._arrived("callbacks, all due at once", refused, due_at, ())

    async def _lateness(self) -> Measure:
        """Measure how late calls arrive that are due one after the other."""
        rate = self._plan.rate
        count = min(self._plan.count, int(rate * min(self._plan.seconds, 5.0)) or 1)
        first = self._now() + LEAD
        refused = await self._due([first + number / rate for number in range(count)])
        await self._cancel()
        late = [arrival.late for arrival in self._sink.arrivals]
        return self._arrived(f"callbacks, {rate:,}/s due: lateness", refused, first, late)

    def _arrived(self, what: str, refused: int, since: float, times: Iterable[float]) -> Measure:
        """Return the line of what the sink has seen since the first task was due."""
        arrivals = self._sink.arrivals
        passed = arrivals[-1].at - since if arrivals else 0.0
        rate = len(arrivals) / passed if passed > 0 else 0.0
        return self._measure(what, len(arrivals), refused, rate, times)

    async def _due(self, dues: Sequence[float]) -> int:
        """Submit tasks due then and wait for their calls; return how many were refused."""
        self._sink.expect(len(dues))
        bodies = self._batched(dues)
        load = await self._server.drive("/v1/tasks/batch", bodies, self._plan.seconds)
        self._sink.await_only(load.done)
        await self._sink.filled(max(0.0, dues[-1] - self._now()) + self._plan.seconds)
        return load.refused

    def _tasks(self, dues: Iterable[float]) -> Iterator[bytes]:
        for due in dues:
            due_ms = round(due * 1000)
            task = {"service": self._name, "payload": due_ms, "due_at": moment_of_ms(due_ms)}
            yield json.dumps(task).encode()

    def _batched(self, dues: Sequence[float]) -> Iterator[tuple[int, bytes]]:
        for start in range(0, len(dues), self._plan.batch):
            items = list(self._tasks(dues[start : start + self._plan.batch]))
            yield len(items), b"[" + b",".join(items) + b"]"

    def _measure(
        self, what: str, count: int, refused: int, rate: float, times: Iterable[float]
    ) -> Measure:
        from tickwheel.cli.load import part  # noqa: PLC0415 - needs httptools

        times = list(times)
        return Measure(what, count, refused, rate, part(times, 0.5), part(times, 0.99))


def tell(line: str) -> None:
    """Say on a terminal what is going on."""
    if sys.stderr.isatty():
        exits.say(line, err=True)


def show(out: Output, plan: Plan, measures: list[Measure]) -> None:
    """Print the table."""
    if out.as_json:
        out.value(measures)
        return
    rows = [
        [m.what, m.count, m.refused, f"{m.rate:,.0f}/s", span(m.p50), span(m.p99)] for m in measures
    ]
    out.table(["what", "tasks", "refused", "rate", "p50", "p99"], rows)
    exits.say(f"{plan.connections} connections; the bench and the server share the machine")

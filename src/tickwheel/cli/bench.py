"""`bench`: measure a running server, from the submitter's side and from the callee's."""

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

from tickwheel.cli import exit_codes, terminal
from tickwheel.cli.output import Output, examples, format_duration, format_time_ms, with_output
from tickwheel.cli.remote import open_client, server_options
from tickwheel.clock import SystemClock, WallClock
from tickwheel.errors import ServiceInUse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence

    from tickwheel.cli.bench_load import Server
    from tickwheel.cli.bench_sink import Sink

NOT_DUE_SECONDS = 86_400.0  # delay of tasks that are submitted and never called
LEAD_SECONDS = 2.0  # tasks to be called are submitted this long before they are due
DELETE_TRIES = 40  # a quarter of a second apart


@dataclass(frozen=True, slots=True)
class Measurement:
    """One line of the table; times are in seconds."""

    what: str
    count: int
    refused: int
    rate: float
    p50: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a bench."""

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
    help="Tasks per measurement.",
)  # fmt: skip
@click.option(
    "--connections", type=click.IntRange(1, 1000), default=32, show_default=True,
    help="Requests in flight at once.",
)  # fmt: skip
@click.option(
    "--seconds", type=click.FloatRange(0.5, 3600), default=15.0, show_default=True,
    help="The longest time for each measurement.",
)  # fmt: skip
@click.option(
    "--batch", type=click.IntRange(1, 10_000), default=1000, show_default=True,
    help="Tasks per batch.",
)  # fmt: skip
@click.option(
    "--rate", type=click.IntRange(1, 100_000), default=500, show_default=True,
    help="Callbacks due per second in the measurement of lateness.",
)  # fmt: skip
@click.option(
    "--sink", "host", default="127.0.0.1", show_default=True, metavar="ADDRESS",
    help="An address of this machine that the server can reach.",
)  # fmt: skip
@with_output
@server_options
def bench(
    *, out: Output, server: str, token: str | None, namespace: str | None, **options: Any
) -> int:
    """Measure a running server.

    The bench creates a service bench-… and a sink that receives its calls; the server must be
    allowed to call it: `tickwheel serve --allow-private-targets`. At the end, also after Ctrl-C or
    SIGTERM, the bench deletes the service and cancels its remaining tasks; ended tasks stay in the
    backlog until they are pruned.

    Lateness is measured where the call arrives, so bench and server must use the same clock.
    """
    try:
        from tickwheel.cli.bench_load import Server  # noqa: PLC0415 - needs httptools
        from tickwheel.cli.bench_sink import Sink  # noqa: PLC0415
    except ImportError as missing:
        raise click.ClickException(
            f"{missing}; the bench needs: pip install 'tickwheel[client]'"
        ) from missing
    plan = Plan(**options)
    check_server_options(server, token, namespace)
    headers = [("authorization", f"Bearer {token}")] if token else []
    headers += [("tickwheel-namespace", namespace)] if namespace else []

    async def run() -> list[Measurement]:
        stop_on_sigterm()
        now = SystemClock().time
        async with (
            Server(server, headers, plan.connections, now) as there,
            Sink(WallClock().time) as sink,
        ):
            return await Bench(plan, there, sink, WallClock().time).run()

    try:
        measures = run_on_fastest_loop(run())
    except asyncio.CancelledError:
        return exit_codes.TERMINATED
    print_results(out, plan, measures)
    return exit_codes.OK if all(measure.count for measure in measures) else exit_codes.OTHER


def check_server_options(server: str, token: str | None, namespace: str | None) -> None:
    """Raise a usage error for a wrong server, token or namespace, as every command does."""
    try:
        open_client(server, token, namespace).close()
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def run_on_fastest_loop(main: Coroutine[Any, Any, list[Measurement]]) -> list[Measurement]:
    """Run on uvloop if it is installed."""
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
    with contextlib.suppress(NotImplementedError):  # Windows has no such handlers
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


class Bench:
    """The measurements, one after the other, on a service of their own."""

    def __init__(self, plan: Plan, server: Server, sink: Sink, now: Callable[[], float]) -> None:
        self._plan = plan
        self._server = server
        self._sink = sink
        self._now = now  # wall-clock time, as due times are
        self._name = f"bench-{secrets.token_hex(4)}"

    async def run(self) -> list[Measurement]:
        """Run all measurements, and always clean up."""
        try:
            port = await self._sink.start(self._plan.host)
        except OSError as error:
            raise click.ClickException(f"--sink {self._plan.host}: {error.strerror}") from error
        async with self._service(port):
            measures = []
            for step in (self._single, self._batches, self._callbacks, self._lateness):
                print_step(f"measuring {step.__name__.strip('_')} …")
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
            await asyncio.wait([put])  # an interrupt may come while the server is creating it
            if put.exception() is None:
                print_step("cleaning up …")
                await self._delete_service()

    async def _delete_service(self) -> None:
        for _ in range(DELETE_TRIES):
            await self._cancel()
            try:
                await self._server.ask("DELETE", f"/v1/services/{self._name}")
            except ServiceInUse:  # calls are still in flight
                await asyncio.sleep(0.25)
            else:
                return
        terminal.print_warning(
            f"{self._name} has calls in flight and could not be deleted; later, run:"
            f" tickwheel services delete {self._name}"
        )

    async def _cancel(self) -> None:
        while (await self._server.ask("POST", "/v1/tasks/cancel", {"service": self._name}))[
            "cancelled"
        ]:
            pass

    async def _single(self) -> Measurement:
        """Measure submits of one task each."""
        dues = [self._now() + NOT_DUE_SECONDS] * self._plan.count
        bodies = ((1, body) for body in self._task_bodies(dues))
        load = await self._server.drive("/v1/tasks", bodies, self._plan.seconds)
        await self._cancel()
        return self._measure("submits", load.done, load.refused, load.rate, load.times)

    async def _batches(self) -> Measurement:
        """Measure submits in batches; each time is that of a whole batch."""
        bodies = self._batch_bodies([self._now() + NOT_DUE_SECONDS] * self._plan.count)
        load = await self._server.drive("/v1/tasks/batch", bodies, self._plan.seconds)
        await self._cancel()
        what = f"submits in batches of {self._plan.batch:,}"
        return self._measure(what, load.done, load.refused, load.rate, load.times)

    async def _callbacks(self) -> Measurement:
        """Measure how many calls per second arrive when all tasks are due at once."""
        due_at = self._now() + LEAD_SECONDS
        refused = await self._submit_and_wait([due_at] * self._plan.count)
        await self._cancel()
        return self._measure_arrivals("callbacks, all due at once", refused, due_at, ())

    async def _lateness(self) -> Measurement:
        """Measure the lateness of calls that are due one after the other."""
        rate = self._plan.rate
        count = min(self._plan.count, int(rate * min(self._plan.seconds, 5.0)) or 1)
        first = self._now() + LEAD_SECONDS
        refused = await self._submit_and_wait([first + number / rate for number in range(count)])
        await self._cancel()
        late = [arrival.late for arrival in self._sink.arrivals]
        return self._measure_arrivals(f"callbacks, {rate:,}/s due: lateness", refused, first, late)

    def _measure_arrivals(
        self, what: str, refused: int, since: float, times: Iterable[float]
    ) -> Measurement:
        """Return the line for the calls that the sink got since the first task was due."""
        arrivals = self._sink.arrivals
        passed = arrivals[-1].at - since if arrivals else 0.0
        rate = len(arrivals) / passed if passed > 0 else 0.0
        return self._measure(what, len(arrivals), refused, rate, times)

    async def _submit_and_wait(self, dues: Sequence[float]) -> int:
        """Submit tasks with these due times, wait for their calls, return how many were refused."""
        self._sink.expect(len(dues))
        bodies = self._batch_bodies(dues)
        load = await self._server.drive("/v1/tasks/batch", bodies, self._plan.seconds)
        self._sink.lower_expected(load.done)
        await self._sink.wait_until_complete(max(0.0, dues[-1] - self._now()) + self._plan.seconds)
        return load.refused

    def _task_bodies(self, dues: Iterable[float]) -> Iterator[bytes]:
        for due in dues:
            due_ms = round(due * 1000)
            task = {"service": self._name, "payload": due_ms, "due_at": format_time_ms(due_ms)}
            yield json.dumps(task).encode()

    def _batch_bodies(self, dues: Sequence[float]) -> Iterator[tuple[int, bytes]]:
        for start in range(0, len(dues), self._plan.batch):
            items = list(self._task_bodies(dues[start : start + self._plan.batch]))
            yield len(items), b"[" + b",".join(items) + b"]"

    def _measure(
        self, what: str, count: int, refused: int, rate: float, times: Iterable[float]
    ) -> Measurement:
        from tickwheel.cli.bench_load import quantile  # noqa: PLC0415 - needs httptools

        times = list(times)
        return Measurement(what, count, refused, rate, quantile(times, 0.5), quantile(times, 0.99))


def print_step(line: str) -> None:
    """Print the current step, on a terminal only."""
    if sys.stderr.isatty():
        terminal.print_line(line, err=True)


def print_results(out: Output, plan: Plan, measures: list[Measurement]) -> None:
    """Print the table of measurements."""
    if out.as_json:
        out.value(measures)
        return
    rows = [
        [
            m.what,
            m.count,
            m.refused,
            f"{m.rate:,.0f}/s",
            format_duration(m.p50),
            format_duration(m.p99),
        ]
        for m in measures
    ]
    out.table(["what", "tasks", "refused", "rate", "p50", "p99"], rows)
    terminal.print_line(
        f"{plan.connections} connections; the bench and the server share the machine"
    )

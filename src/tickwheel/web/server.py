"""The server: a scheduler, the API on it, and one process or several that listen.

`run` is what `tickwheel serve` does: it returns the process's exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import uvicorn

from tickwheel.clock import SystemClock
from tickwheel.durable.permits import descriptors
from tickwheel.durable.scheduler import Scheduler
from tickwheel.errors import TickwheelError, WrongStore
from tickwheel.web.access import Guard
from tickwheel.web.app import App, Limits
from tickwheel.web.lobby import Lobby, places
from tickwheel.web.logs import set_up, sign
from tickwheel.web.metrics import families_of
from tickwheel.web.protocol import Protocol
from tickwheel.web.siblings import Siblings
from tickwheel.web.tls import Certificate, Listener
from tickwheel.web.tracing import Tracing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tickwheel.config import Config

logger = logging.getLogger("tickwheel.web")

BACKLOG = 2_048
KEEP_ALIVE_SECONDS = 75
# The threads of the store take the interpreter's lock several times for one statement. Each time
# they wait this long for a loop that is busy; Python's own 5 ms would add up to tenths of a second.
SWITCH_SECONDS = 0.000_2
INHERITED = "TICKWHEEL_INHERITED"
REFUSED = 2
FAILED = 1


class Inherited(NamedTuple):
    """What a worker has from its supervisor, in the variable INHERITED."""

    listener: int  # the socket that all listen on
    lifeline: int  # a pipe that ends with the supervisor
    number: int  # of this worker, from 0 on
    workers: int  # how many there are
    directory: str  # where each has a socket for its siblings

    def written(self) -> str:
        """Return it as the value of a variable."""
        return ",".join(map(str, self))

    @classmethod
    def read(cls, text: str) -> Inherited:
        """Return what was written."""
        listener, lifeline, number, workers, directory = text.split(",", 4)
        return cls(int(listener), int(lifeline), int(number), int(workers), directory)


class Refusal(TickwheelError, ValueError):
    """The server does not start, since that would not be safe."""

    code = "unsafe"


def run(config: Config) -> int:
    """Serve until told to stop; return the exit code."""
    set_up(config.log_level, config.log_format)
    inherited = os.environ.pop(INHERITED, None)
    try:
        check_system()
        if config.workers > 1 and inherited is None:
            from tickwheel.web.workers import supervise  # noqa: PLC0415 - few need it

            return supervise(config, listening(config))
        if inherited is None:
            return start(config, listening(config))
        found = Inherited.read(inherited)
        return start(config, socket.socket(fileno=found.listener), found)
    except (TickwheelError, OSError, ImportError, ValueError) as error:
        logger.error("cannot start: %s", error)  # noqa: TRY400
        return REFUSED if isinstance(error, Refusal | WrongStore) else FAILED


def check_system() -> None:
    """Raise where the system lacks the signals and sockets that the service is built on."""
    if not hasattr(signal, "SIGHUP") or not hasattr(socket, "AF_UNIX"):
        raise Refusal(
            "the service runs on Linux and macOS; on this system use the timers, the clients and "
            "tickwheel.durable"
        )


def start(config: Config, listener: socket.socket, inherited: Inherited | None = None) -> int:
    """Run the loop of one process."""
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop  # noqa: PLC0415 - an extra that is not on every system

        factory = uvloop.new_event_loop
    # What was loaded stays, and requests make no cycles: looking for them often costs lateness.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(config, listener, inherited))
    return 0


def listening(config: Config) -> socket.socket:
    """Return the socket that requests come to."""
    host, port = config.listen
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise OSError(f"{config.listen}: {error.strerror or error}") from error


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def serve(
    config: Config, listener: socket.socket, inherited: Inherited | None = None
) -> None:
    """Run scheduler and API until SIGTERM or SIGINT, or until the supervisor is gone."""
    descriptors.raise_limit()
    scheduler = Scheduler(
        config.store, dispatch=not config.submit_only, coordinator=config.coordinator,
        horizon=config.horizon, cap=config.cap, retention=config.retention,
        audit_retention=config.audit_retention, grace=config.grace,
        shards=config.shards, node=config.node, secret_key=config.secret_key,
        allow_private_targets=config.allow_private_targets, allow_targets=config.allow_target,
        own_port=listener.getsockname()[1], max_calls=config.max_calls, max_body=config.max_payload,
    )  # fmt: skip
    tracing = Tracing(config.otlp_endpoint) if config.otlp_endpoint else None
    await scheduler.start()
    sign(scheduler.node.name)
    try:
        local = is_loopback(config.listen.host)
        guard = Guard(scheduler.node.directory, local=local, open_access=config.open_access,
                      rate=config.token_rate)  # fmt: skip
        check_tokens(config, guard)
        limits = Limits(config.max_body, config.max_batch, config.max_payload)
        app = App(scheduler, guard, limits, here_only=local, tracing=tracing)
        if tracing is not None:
            tracing.follow(scheduler.node.channels)
        certificate = None
        if config.tls_cert is not None and config.tls_key is not None:
            certificate = Certificate(config.tls_cert, config.tls_key)
        lobby = Lobby(places(config.max_connections), SystemClock())
        server = Server(uvicorn_config(app, lobby), app, lobby, config.grace, certificate)
        if inherited is None:
            announce(config, listener)
        async with server.among_siblings(inherited):
            with server.signals():
                await server.serve([listener])
                await app.logins.close()
                await scheduler.stop(server.grace_left())
    except BaseException:
        if scheduler.running:
            await scheduler.stop(0)
        raise
    finally:
        if tracing is not None:
            tracing.close()


def check_tokens(config: Config, guard: Guard) -> None:
    """Raise or warn when nobody can be let in: tasks go on where there once was a token."""
    if guard.open or guard.tokens:
        return
    if not guard.had_tokens:
        raise Refusal(
            f"{config.listen} is not a loopback address, and there is no token: anybody could"
            " do anything. Make a token with `tickwheel tokens create`, or say"
            " --insecure-without-tokens"
        )
    logger.warning(
        "every token of this store was revoked: requests are refused until there is one; make it"
        " with `tickwheel tokens create` on the store"
    )


def uvicorn_config(app: App, lobby: Lobby) -> uvicorn.Config:
    """Return what uvicorn is to do."""
    return uvicorn.Config(
        app, http=partial(Protocol, lobby),  # type: ignore[arg-type]
        ws="none", lifespan="off", loop="none", interface="asgi3",
        log_config=None, access_log=False, server_header=False, date_header=True,
        proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )  # fmt: skip


def announce(config: Config, listener: socket.socket) -> None:
    """Say where it is, for people and for whoever started it on any free port."""
    port = listener.getsockname()[1]
    scheme = "https" if config.tls_cert else "http"
    host = f"[{config.listen.host}]" if ":" in config.listen.host else config.listen.host
    print(f"tickwheel: {scheme}://{host}:{port}/", flush=True)  # noqa: T201


class Server(uvicorn.Server):
    """uvicorn's server, whose signals are ours: the scheduler has to be stopped after it.

    - Told to stop, it goes on listening while calls are under way, and says so to whoever asks:
      a balancer sees by /readyz that it is to ask others, and nobody is refused a connection.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        app: App,
        lobby: Lobby,
        grace: float,
        certificate: Certificate | None,
    ) -> None:
        super().__init__(config)
        self._app = app
        self._lobby = lobby
        self._grace = grace
        self._certificate = certificate
        self._orphaned = False
        self._clock = SystemClock()
        self._told_at = self._clock.time()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: uvicorn would end the process by them."""
        yield

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Stop at the first SIGTERM or SIGINT, without grace at the second; renew at SIGHUP.

        Where there is a terminal, SIGHUP says that it was closed, and is a stop as well.
        """
        loop = asyncio.get_running_loop()
        heeded = {
            signal.SIGTERM: self._told,
            signal.SIGINT: self._told,
            signal.SIGHUP: self._told if sys.stderr.isatty() else self.renew_certificate,
        }
        for number, told in heeded.items():
            loop.add_signal_handler(number, told)
        try:
            yield
        finally:
            for number in heeded:
                loop.remove_signal_handler(number)

    @contextlib.asynccontextmanager
    async def among_siblings(self, inherited: Inherited | None) -> AsyncIterator[None]:
        """Be one worker of several, if it is: tell the others what it counts, and ask them."""
        if inherited is None:
            yield
            return
        _, lifeline, number, workers, directory = inherited
        app = self._app
        siblings = Siblings(
            number, workers, directory, lambda within: families_of(app, None, within, number)
        )
        asyncio.get_running_loop().add_reader(lifeline, self.abandoned, lifeline)
        await siblings.open()
        app.siblings = siblings
        try:
            yield
        finally:
            siblings.close(last=self._orphaned)

    def _told(self) -> None:
        if self._app.stopping:
            self._told_again()
        self._told_at = self._clock.time()
        self._app.stopping = True
        under_way = len(self._app.node.dispatch.running)
        logger.info("stopping: calls under way: %d, for up to %g s", under_way, self._grace)
        self._app.node.leave()  # while requests end, other nodes take over what is due

    def renew_certificate(self) -> None:
        """Read the certificate and its key again, for connections from now on."""
        if self._certificate is None:
            logger.info("SIGHUP is ignored: without TLS there is no certificate to read again")
        else:
            self._certificate.renew()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup([] if self._certificate else sockets)
        if self._certificate is not None:
            make = partial(
                Protocol, self._lobby, config=self.config, server_state=self.server_state,
                app_state=self.lifespan.state,
            )  # fmt: skip
            for one in sockets or []:
                listener = Listener(one, self._certificate.context, self._lobby, make)
                self.servers.append(listener)  # type: ignore[arg-type]

    async def on_tick(self, counter: int) -> bool:
        """Say whether to end: what was under way has ended, or its time is over."""
        if self._app.stopping and not (self._app.node.dispatch.running and self.grace_left()):
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let nobody in any more, and answer what is being asked, within what is left."""
        self.config.timeout_graceful_shutdown = max(1, round(self.grace_left()))
        await super().shutdown(sockets)

    def abandoned(self, lifeline: int) -> None:
        """The supervisor is gone: stop, as if it had said so."""
        asyncio.get_running_loop().remove_reader(lifeline)
        self._orphaned = True
        if not self._app.stopping:
            logger.warning("the supervisor is gone: stopping")
            self._told()

    def grace_left(self) -> float:
        """Return how much of the grace time is left since it was told to stop."""
        return max(0.0, self._told_at + self._grace - self._clock.time())

    def _told_again(self) -> None:
        logger.warning("stopped a second time: leaving at once; nothing that was stored is lost")
        sys.stderr.flush()
        os._exit(FAILED)

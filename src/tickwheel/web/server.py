"""The server: a scheduler and its API, in one process or several.

`run` implements `tickwheel serve`, and returns the exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import uvicorn

from tickwheel.clock import SystemClock
from tickwheel.config import Listen
from tickwheel.durable.permits import descriptors
from tickwheel.durable.scheduler import Scheduler
from tickwheel.errors import TickwheelError, WrongStore
from tickwheel.supervisor import EXIT_FAILED, EXIT_REFUSED
from tickwheel.web.access import Guard
from tickwheel.web.app import App, Limits
from tickwheel.web.cluster import own_figures
from tickwheel.web.connection_limit import ConnectionLimit, allowed_connections
from tickwheel.web.logs import set_node_name, set_up_logging
from tickwheel.web.metrics import app_families
from tickwheel.web.metrics_listener import bind_listener, listen_error
from tickwheel.web.peers import Peers, is_loopback
from tickwheel.web.protocol import Protocol
from tickwheel.web.tls import Certificate, Listener
from tickwheel.web.tracing import Tracing
from tickwheel.web.worker_metrics import WorkerMetrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tickwheel.config import Config
    from tickwheel.web.grpc.server import GrpcServer

logger = logging.getLogger("tickwheel.web")

LISTEN_BACKLOG = 2_048
KEEP_ALIVE_SECONDS = 75
# The store's threads take the interpreter lock several times per statement, and each time wait this
# long for a busy event loop. Python's default of 5 ms would add up to tenths of a second.
SWITCH_SECONDS = 0.000_2
WILDCARDS = ("0.0.0.0", "::")  # noqa: S104
INHERITED_VARIABLE = "TICKWHEEL_INHERITED"


class Inherited(NamedTuple):
    """The values that a worker gets from its supervisor, in `INHERITED_VARIABLE`."""

    listener: int  # file descriptor of the socket on which all workers listen
    lifeline: int  # file descriptor of a pipe that closes when the supervisor ends
    number: int  # of this worker, counted from 0
    workers: int  # the number of all workers
    grpc_port: int  # of the gRPC API, on which all workers listen; 0 without it
    directory: str  # of the sockets on which workers exchange metrics

    def to_text(self) -> str:
        """Return the value of the environment variable."""
        return ",".join(map(str, self))

    @classmethod
    def from_text(cls, text: str) -> Inherited:
        """Return the values in a text from `to_text`."""
        numbers = text.split(",", 5)
        directory = numbers.pop()
        listener, lifeline, number, workers, grpc_port = map(int, numbers)
        return cls(listener, lifeline, number, workers, grpc_port, directory)


class StartRefused(TickwheelError, ValueError):
    """The server cannot start as it is told to: that would be unsafe, or cannot work here."""

    code = "unsafe"


def run(config: Config) -> int:
    """Serve until a signal stops it; return the exit code."""
    set_up_logging(config.log_level, config.log_format)
    inherited = os.environ.pop(INHERITED_VARIABLE, None)
    try:
        check_system()
        if config.workers > 1 and inherited is None:
            from tickwheel.web.supervisor import supervise  # noqa: PLC0415 - rarely needed

            return supervise(config, bind_listener(config.listen, LISTEN_BACKLOG))
        if inherited is None:
            return start(config, bind_listener(config.listen, LISTEN_BACKLOG))
        found = Inherited.from_text(inherited)
        return start(config, socket.socket(fileno=found.listener), found)
    except (TickwheelError, OSError, ImportError, ValueError) as error:
        logger.error("cannot start: %s", error)  # noqa: TRY400
        return EXIT_REFUSED if isinstance(error, StartRefused | WrongStore) else EXIT_FAILED


def check_system() -> None:
    """Raise on a system without the signals and sockets that the service needs."""
    if not hasattr(signal, "SIGHUP") or not hasattr(socket, "AF_UNIX"):
        raise StartRefused(
            "the service runs on Linux and macOS; on this system use the timers, the clients and "
            "tickwheel.durable"
        )


def start(config: Config, listener: socket.socket, inherited: Inherited | None = None) -> int:
    """Run the event loop of one process."""
    factory = None
    with contextlib.suppress(ImportError):
        import uvloop  # noqa: PLC0415 - optional

        factory = uvloop.new_event_loop
    # Modules stay loaded and requests make no cycles: frequent collections only add lateness.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(config, listener, inherited))
    return 0


def reserve_port(address: Listen, *, shared: bool = False) -> socket.socket:
    """Return a socket that holds an address; if `shared`, others may listen on the same port."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(tuple(address))
    except OSError as error:
        held.close()
        raise listen_error(address, error, "--grpc-listen") from error
    return held


async def serve(
    config: Config, listener: socket.socket, inherited: Inherited | None = None
) -> None:
    """Run the scheduler and the API until SIGTERM, SIGINT, or the end of the supervisor."""
    certificate = load_certificate(config)  # before this node takes shards from others
    descriptors.raise_limit()
    tracing = Tracing(config.otlp_endpoint) if config.otlp_endpoint else None
    scheduler = Scheduler(
        config.store, dispatch=not config.submit_only, coordinator=config.coordinator,
        horizon=config.horizon, cap=config.cap, retention=config.retention,
        audit_retention=config.audit_retention, grace=config.grace,
        shards=config.shards, node=config.node, weight=config.weight,
        address=address_of(config, listener), secret_key=config.secret_key,
        allow_private_targets=config.allow_private_targets, allow_targets=config.allow_target,
        own_port=listener.getsockname()[1], max_calls=config.max_calls, max_body=config.max_payload,
        grpc_tls=(config.grpc_ca, config.grpc_cert, config.grpc_key),
        tracing=False if tracing is None else tracing.provider,
    )  # fmt: skip
    await scheduler.start()
    set_node_name(scheduler.node.name)
    try:
        local = all(is_loopback(one.host) for one in addresses_of(config))
        guard = Guard(scheduler.node.directory, local=local, open_access=config.open_access,
                      rate=config.token_rate)  # fmt: skip
        check_tokens(config, guard)
        limits = Limits(config.max_body, config.max_batch, config.max_payload)
        https = config.tls_cert is not None
        peers = Peers(local=local, https=https)
        app = App(scheduler, guard, limits, loopback_only=local, tracing=tracing, peers=peers)
        connections = allowed_connections(config.max_connections)
        if config.grpc_listen is not None:
            connections = max(1, connections // 2)  # each API has half of them
        limit = ConnectionLimit(connections, SystemClock())
        server = Server(uvicorn_config(app, limit), app, limit, config.grace, certificate)
        if config.grpc_listen is not None:
            server.grpc = grpc_server(app, config, connections, inherited)
            await server.grpc.start()
        if inherited is None:
            announce(config, listener, server.grpc)
        async with server.as_worker(inherited):
            with server.signals():
                await server.serve([listener])
                if server.grpc is not None:
                    await server.grpc.stop(server.grace_left())
                await app.failed_logins.close()
                await peers.close()
                await scheduler.stop(server.grace_left())
    except BaseException:
        if scheduler.running:
            await scheduler.stop(0)
        raise
    finally:
        if tracing is not None:
            tracing.close()


def load_certificate(config: Config) -> Certificate | None:
    """Return the certificate, if there is one; refuse to start if a file of TLS cannot be used."""
    try:
        if config.grpc_client_ca is not None:
            config.grpc_client_ca.read_bytes()
        if config.tls_cert is not None and config.tls_key is not None:
            return Certificate(config.tls_cert, config.tls_key)
    except OSError as error:
        raise StartRefused(str(error)) from error
    return None


def addresses_of(config: Config) -> list[Listen]:
    """Return the addresses of both APIs."""
    return [one for one in (config.listen, config.grpc_listen) if one is not None]


def grpc_server(
    app: App, config: Config, connections: int, inherited: Inherited | None
) -> GrpcServer:
    """Return the server of the gRPC API, which needs packages of its own."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # otherwise any stranger can fill the log
    try:
        from tickwheel.web.grpc.server import GrpcServer  # noqa: PLC0415
    except ImportError as missing:
        raise ImportError(
            f"{missing}; --grpc-listen needs: pip install 'tickwheel[grpc]'"
        ) from missing
    if inherited is not None:
        return GrpcServer(app, config, connections, inherited.grpc_port)
    assert config.grpc_listen is not None
    reserve_port(config.grpc_listen).close()  # it says why it cannot be listened on; gRPC does not
    return GrpcServer(app, config, connections)


def check_tokens(config: Config, guard: Guard) -> None:
    """Raise if everybody would have access; warn if all tokens are revoked."""
    if guard.open or guard.tokens:
        return
    if not guard.had_tokens:
        open_one = next(one for one in addresses_of(config) if not is_loopback(one.host))
        raise StartRefused(
            f"{open_one} is not a loopback address, and there is no token: anybody could"
            " do anything. Create a token with `tickwheel tokens create`, or pass"
            " --insecure-without-tokens"
        )
    logger.warning(
        "every token of this store was revoked: requests are refused until you create one with"
        " `tickwheel tokens create` on the store"
    )


def uvicorn_config(app: App, connection_limit: ConnectionLimit) -> uvicorn.Config:
    """Return the configuration of uvicorn."""
    return uvicorn.Config(
        app, http=partial(Protocol, connection_limit),  # type: ignore[arg-type]
        ws="none", lifespan="off", loop="none", interface="asgi3",
        log_config=None, access_log=False, server_header=False, date_header=True,
        proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )  # fmt: skip


def url_of(config: Config, listener: socket.socket) -> str:
    """Return the URL of the API, without a path."""
    scheme = "https" if config.tls_cert else "http"
    return f"{scheme}://{Listen(config.listen.host, listener.getsockname()[1])}"


def address_of(config: Config, listener: socket.socket) -> str | None:
    """Return the URL at which other nodes reach this one; None for a wildcard address."""
    if config.advertise is not None or config.listen.host in WILDCARDS:
        return config.advertise
    return url_of(config, listener)


def announce(config: Config, listener: socket.socket, grpc: GrpcServer | None = None) -> None:
    """Print the URLs, for people and for programs that started it on a free port."""
    print(f"tickwheel: {url_of(config, listener)}/", flush=True)  # noqa: T201
    if grpc is not None:
        announce_grpc(config, grpc.port)


def announce_grpc(config: Config, port: int) -> None:
    """Print the address of the gRPC API."""
    assert config.grpc_listen is not None
    scheme = "grpcs" if config.tls_cert else "grpc"
    print(f"tickwheel: {scheme}://{Listen(config.grpc_listen.host, port)}", flush=True)  # noqa: T201


class Server(uvicorn.Server):
    """uvicorn's server with our signal handlers: the scheduler has to stop after it.

    - While it stops, it goes on listening until the calls under way have ended. A load balancer
      sees at /readyz that it must use other servers, and no connection is refused.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        app: App,
        connection_limit: ConnectionLimit,
        grace: float,
        certificate: Certificate | None,
    ) -> None:
        super().__init__(config)
        self._app = app
        self._connection_limit = connection_limit
        self._grace = grace
        self._certificate = certificate
        self.grpc: GrpcServer | None = None
        self._orphaned = False
        self._clock = SystemClock()
        self._stop_began = self._clock.time()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers: those of uvicorn would end the process."""
        yield

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Stop at the first SIGTERM or SIGINT, at once at the second; reload TLS at SIGHUP.

        On a terminal, SIGHUP means that it was closed, and stops the server as well.
        """
        loop = asyncio.get_running_loop()
        handlers = {
            signal.SIGTERM: self._stop,
            signal.SIGINT: self._stop,
            signal.SIGHUP: self._stop if sys.stderr.isatty() else self.reload_certificate,
        }
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)

    @contextlib.asynccontextmanager
    async def as_worker(self, inherited: Inherited | None) -> AsyncIterator[None]:
        """Act as one of several workers, if there are: watch the supervisor, exchange metrics."""
        if inherited is None:
            yield
            return
        _, lifeline, number, workers, _, directory = inherited
        app = self._app
        metrics = WorkerMetrics(
            number, workers, directory,
            lambda within, counts: app_families(app, counts, within, number),
            lambda kind, within: own_figures(app, kind, within),
        )  # fmt: skip
        asyncio.get_running_loop().add_reader(lifeline, self.on_supervisor_gone, lifeline)
        await metrics.open()
        app.worker_metrics = metrics
        try:
            yield
        finally:
            metrics.close(last=self._orphaned)

    def _stop(self) -> None:
        if self._app.stopping:
            self._exit_at_once()
        self._stop_began = self._clock.time()
        self._app.stopping = True
        self._app.live.close()
        under_way = len(self._app.node.dispatch.running)
        logger.info("stopping: calls under way: %d, for up to %g s", under_way, self._grace)
        self._app.node.leave()  # so that other nodes take over the due tasks now

    def reload_certificate(self) -> None:
        """Read the certificate and its key again, for new connections."""
        if self._certificate is None:
            logger.info("ignoring SIGHUP: without TLS there is no certificate to reload")
        else:
            self._certificate.reload()
            if self.grpc is not None:
                self.grpc.reload_certificate()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, with TLS if there is a certificate."""
        await super().startup([] if self._certificate else sockets)
        if self._certificate is not None:
            make = partial(
                Protocol, self._connection_limit, config=self.config,
                server_state=self.server_state, app_state=self.lifespan.state,
            )  # fmt: skip
            for one in sockets or []:
                listener = Listener(one, self._certificate.context, self._connection_limit, make)
                self.servers.append(listener)  # type: ignore[arg-type]

    async def on_tick(self, counter: int) -> bool:
        """Return whether to exit: all calls have ended, or the grace time is over."""
        if self._app.stopping and not (self._app.node.dispatch.running and self.grace_left()):
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and answer pending requests within the grace time."""
        self.config.timeout_graceful_shutdown = max(1, round(self.grace_left()))
        await super().shutdown(sockets)

    def on_supervisor_gone(self, lifeline: int) -> None:
        """Stop as after SIGTERM: the supervisor is gone."""
        asyncio.get_running_loop().remove_reader(lifeline)
        self._orphaned = True
        if not self._app.stopping:
            logger.warning("the supervisor is gone: stopping")
            self._stop()

    def grace_left(self) -> float:
        """Return the seconds of grace time that are left."""
        return max(0.0, self._stop_began + self._grace - self._clock.time())

    def _exit_at_once(self) -> None:
        logger.warning("second signal: exiting at once; no stored task is lost")
        sys.stderr.flush()
        os._exit(EXIT_FAILED)

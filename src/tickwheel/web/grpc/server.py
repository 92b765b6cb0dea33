"""The gRPC server of one process: its address, TLS and limits."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tickwheel.web.grpc.discovery import Discovery
from tickwheel.web.grpc.requests import Requests

if TYPE_CHECKING:
    from pathlib import Path

    from tickwheel.config import Config
    from tickwheel.web.app import App

logger = logging.getLogger("tickwheel.web")

MAX_REQUESTS = 4_096  # at once, watches included
MAX_STREAMS = 256  # at once on one connection
METADATA_BYTES = 16_384
WINDOW_BYTES = 65_536  # that a caller may send before its message is read
HANDSHAKE_MS = 5_000
IDLE_MS = 120_000  # a connection without requests is closed; clients open another when needed
AGE_MS, AGE_GRACE_MS = 3_600_000, 60_000  # ends calls whose callers do not read the answer
KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 60_000, 20_000
MIN_PING_MS = 10_000  # between two pings of a client
CLOSE_SECONDS = 1.0  # after the grace time of a stop, for the connections to close
IDENTITY_ONLY = 1  # a compressed message may be a thousand times as large


class GrpcServer:
    """Serves the gRPC API; `reserved` is the port that a supervisor holds for its workers."""

    def __init__(
        self, app: App, config: Config, connections: int, reserved: int | None = None
    ) -> None:
        assert config.grpc_listen is not None
        # It logs each caller that disconnects early; errors of ours are logged as over HTTP.
        logging.getLogger("grpc").setLevel(logging.CRITICAL)
        self._requests = Requests(app)
        self._credentials = Credentials(config) if config.tls_cert else None
        options: list[tuple[str, Any]] = [
            ("grpc.so_reuseport", 0 if reserved is None else 1),
            ("grpc.max_allowed_incoming_connections", connections),
            ("grpc.max_receive_message_length", self._requests.message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.max_metadata_size", METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", METADATA_BYTES),
            ("grpc.http2.bdp_probe", 0),  # would let callers send more before it is read
            ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
            ("grpc.compression_enabled_algorithms_bitset", IDENTITY_ONLY),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
            ("grpc.max_connection_idle_ms", IDLE_MS),
            ("grpc.max_connection_age_ms", AGE_MS),
            ("grpc.max_connection_age_grace_ms", AGE_GRACE_MS),
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # only TCP uses it
            ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_MS),
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_REQUESTS)
        self._discovery = Discovery(app)
        self._server.add_generic_rpc_handlers(
            (self._requests.handlers(), *self._discovery.handlers())
        )
        address = config.grpc_listen
        if reserved is not None:
            address = address._replace(port=reserved)
        try:
            if self._credentials is None:
                self.port = self._server.add_insecure_port(str(address))
            else:
                self.port = self._server.add_secure_port(str(address), self._credentials.dynamic)
        except RuntimeError as error:
            raise OSError(f"{address}: {error}") from error

    async def start(self) -> None:
        """Accept connections."""
        await self._server.start()

    def reload_certificate(self) -> None:
        """Read the certificate and its key again, for new connections."""
        if self._credentials is not None:
            self._credentials.reload()

    async def stop(self, grace: float) -> None:
        """Accept nothing more, end the watches, and answer pending requests within `grace`.

        gRPC does not close a connection during a write that the peer does not read, nor one that
        it stopped reading because of too many unsent answers to pings: they end with the process.
        """
        self._requests.end_watches()
        try:
            async with asyncio.timeout(grace + CLOSE_SECONDS):
                await self._server.stop(grace)
        except TimeoutError:
            grpc.aio.init_grpc_aio()  # keeps its thread: to end it means to wait for them


class Credentials:
    """The certificate, its key, and the authority of clients' certificates, read from files."""

    def __init__(self, config: Config) -> None:
        assert config.tls_cert is not None
        assert config.tls_key is not None
        self._files: list[Path] = [config.tls_key, config.tls_cert]
        self._client_ca = config.grpc_client_ca
        self._current = self._read()
        self.dynamic = grpc.dynamic_ssl_server_credentials(
            self._current, lambda: self._current, self._client_ca is not None
        )

    def _read(self) -> Any:
        key, chain = (path.read_bytes() for path in self._files)
        ca = None if self._client_ca is None else self._client_ca.read_bytes()
        return grpc.ssl_server_certificate_configuration([(key, chain)], ca)

    def reload(self) -> None:
        """Read the files again; if one cannot be read, keep what was read before."""
        try:
            self._current = self._read()
        except OSError as error:
            logger.error("the certificate for gRPC is not renewed: %s", error)  # noqa: TRY400

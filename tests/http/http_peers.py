"""What the HTTP client is tested against: servers on real sockets that do as they are told."""

import asyncio
import contextlib
import datetime as dt
import ipaddress
import socket
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    DataReceived,
    PingAckReceived,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import H2Error
from h2.settings import Settings

from tickwheel.http import Address, Pool

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Stage:
    """Servers and pools of one test."""

    def __init__(self, authority, new_loop):
        self.authority = authority
        self.new_loop = new_loop
        self._servers = []
        self._pools = []

    async def server(self, script=None, *, tls=None):
        """A server that plays `script(connection)` on each connection; it begins by listening."""
        server = Server(script or answering(OK), tls)
        await server.start()
        self._servers.append(server)
        return server

    async def http2_server(self, script=None, *, names=("localhost",), settings=None, **options):
        """A server that calls `script(connection, request)` when a request is whole."""
        tls = self.authority.context(*names, alpn=["h2"])
        server = Http2Server(script or echo2, tls, settings or {}, **options)
        await server.start()
        self._servers.append(server)
        return server

    def pool(self, **options):
        """A pool that trusts the authority, and takes every host for this one."""
        options.setdefault("resolve", loopback)
        options.setdefault("ssl", self.authority.client())
        pool = Pool(**options)
        self._pools.append(pool)
        return pool

    async def close(self):
        for pool in self._pools:
            await pool.close()
        for server in self._servers:
            await server.close()


async def loopback(host, port):
    return [Address("127.0.0.1", port, socket.AF_INET)]


def answering(*answers):
    """A script: a request, an answer, in turn; the last one again and again."""

    async def script(connection):
        turn = 0
        while await connection.request() is not None:
            await connection.send(answers[min(turn, len(answers) - 1)])
            turn += 1

    return script


class Server:
    """A server of bare bytes."""

    def __init__(self, script, tls):
        self._script = script
        self._tls = tls
        self._tasks = set()
        self.connections = []
        self.requests = []
        self.scheme = "https" if tls else "http"

    async def start(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]

    def url(self, path="/", host="localhost"):
        return f"{self.scheme}://{host}:{self.port}{path}"

    async def _serve(self, reader, writer):
        self._tasks.add(asyncio.current_task())
        connection = Connection(self, reader, writer)
        self.connections.append(connection)
        try:
            await self._script(connection)
        except (ConnectionError, asyncio.CancelledError, asyncio.IncompleteReadError):
            pass
        finally:
            self._tasks.discard(asyncio.current_task())
            writer.transport.abort()
            connection.ended.set()

    async def close(self):
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        for connection in self.connections:
            await connection.ended.wait()
        await self._server.wait_closed()


class Connection:
    """The server's side of a connection."""

    def __init__(self, server, reader, writer):
        self.server = server
        self.reader = reader
        self.writer = writer
        self.served = 0
        self.ended = asyncio.Event()

    async def request(self):
        """The next request as (first line, headers, body), or None at the end."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        first, *lines = head[:-4].decode("latin-1").split("\r\n")
        headers = [tuple(line.split(": ", 1)) for line in lines]
        names = dict(headers)
        if "content-length" in names:
            body = await self.reader.readexactly(int(names["content-length"]))
        elif names.get("transfer-encoding") == "chunked":
            body = b"".join([chunk async for chunk in self.chunks()])
        else:
            body = b""
        self.served += 1
        self.server.requests.append((first, headers, body))
        return first, headers, body

    async def chunks(self):
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)

    async def send(self, data):
        self.writer.write(data)
        await self.writer.drain()
        await asyncio.sleep(0)  # drain() need not: a flood would never hear that nobody is there

    async def gone(self):
        """Wait until the client has closed it."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(1 << 16):
                pass


class Request2:
    """A request that came over HTTP/2."""

    def __init__(self, number, headers):
        self.number = number
        self.headers = [(name.decode(), value.decode()) for name, value in headers]
        self.body = b""

    def __getitem__(self, name):
        return dict(self.headers)[name]


async def echo2(connection, request):
    await connection.answer(request.number, body=request.body)


class Http2Server:
    """A server of HTTP/2."""

    def __init__(self, script, tls, settings, acknowledge=True):
        self.script = script
        self.settings = settings
        self.acknowledge = acknowledge
        self._tls = tls
        self.connections = []
        self.requests = []
        self.tasks = set()

    async def start(self):
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection2(self), "127.0.0.1", 0, ssl=self._tls
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def url(self, path="/", host="localhost"):
        return f"https://{host}:{self.port}{path}"

    async def close(self):
        self._server.close()
        for task in list(self.tasks):
            task.cancel()
        for connection in self.connections:
            connection.transport.abort()
            await connection.ended.wait()
        await self._server.wait_closed()


class Connection2(asyncio.Protocol):
    """The server's side of an HTTP/2 connection."""

    def __init__(self, server):
        self.server = server
        self.ended = asyncio.Event()
        self.changed = asyncio.Event()  # a window, a reset, a ping's answer
        self.pings = 0
        self.resets = {}
        self.open = {}
        self.most_open = 0

    def connection_made(self, transport):
        self.transport = transport
        self.server.connections.append(self)
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self.h2.local_settings = Settings(client=False, initial_values=self.server.settings)
        self.h2.initiate_connection()
        self.flush()

    def data_received(self, data):
        for event in self.h2.receive_data(data):
            self.take(event)
        self.flush()

    def take(self, event):
        if isinstance(event, RequestReceived):
            self.open[event.stream_id] = Request2(event.stream_id, event.headers)
            self.most_open = max(self.most_open, len(self.open))
        elif isinstance(event, DataReceived):
            if event.stream_id in self.open:
                self.open[event.stream_id].body += event.data
            if self.server.acknowledge:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, StreamEnded):
            request = self.open[event.stream_id]
            self.server.requests.append(request)
            task = asyncio.ensure_future(self.play(request))
            self.server.tasks.add(task)
            task.add_done_callback(self.server.tasks.discard)
        elif isinstance(event, StreamReset):
            self.open.pop(event.stream_id, None)
            self.resets[event.stream_id] = event.error_code
            self.changed.set()
        elif isinstance(event, PingAckReceived):
            self.pings += 1
            self.changed.set()
        elif isinstance(event, WindowUpdated):
            self.changed.set()

    async def play(self, request):
        with contextlib.suppress(H2Error):  # the client has gone on
            await self.server.script(self, request)

    async def answer(self, number, *, status=200, headers=(), body=b""):
        """Send an answer, as fast as the client takes it."""
        self.h2.send_headers(number, [(":status", str(status)), *headers], end_stream=not body)
        self.flush()
        while body:
            room = min(self.h2.local_flow_control_window(number), self.h2.max_outbound_frame_size)
            if room:
                piece, body = body[:room], body[room:]
                self.h2.send_data(number, piece, end_stream=not body)
                self.flush()
            else:
                await self.change()
        self.open.pop(number, None)

    async def change(self):
        self.changed.clear()
        await self.changed.wait()

    def goaway(self, last):
        """Say that streams after `last` are not taken, and go on with the others."""
        frame = (8).to_bytes(3, "big") + b"\x07\x00" + bytes(4)
        self.transport.write(frame + last.to_bytes(4, "big") + bytes(4))

    def flush(self):
        if data := self.h2.data_to_send():
            self.transport.write(data)

    def connection_lost(self, exc):
        self.ended.set()
        self.changed.set()


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame2(kind, flags=0, stream=0, payload=b""):
    """A frame of HTTP/2, whatever it says."""
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


async def request2(connection):
    """Read a client's first words over HTTP/2, up to a request's head; return their frames."""
    kinds = []
    assert await connection.reader.readexactly(len(PREFACE)) == PREFACE
    while 1 not in kinds:
        head = await connection.reader.readexactly(9)
        await connection.reader.readexactly(int.from_bytes(head[:3], "big"))
        kinds.append(head[3])
    return kinds


def usage(signs):
    """What a certificate's key is for; Python asks for that from 3.13 on."""
    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=signs, crl_sign=signs,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


class Authority:
    """A certificate authority, made for one run of the tests."""

    def __init__(self):
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        self.certificate = self._signed(self._name, self._key, x509.BasicConstraints(True, None))

    def client(self):
        """What trusts this authority, and no other."""
        return ssl.create_default_context(cadata=pem(self.certificate).decode())

    def context(self, *names, alpn=None):
        """A server's context, with a certificate for these names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        alternatives = x509.SubjectAlternativeName([as_general(name) for name in names])
        certificate = self._signed(subject, key, alternatives)
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "server.pem")
            path.write_bytes(secret + pem(certificate))
            context.load_cert_chain(path)
        if alpn:
            context.set_alpn_protocols(alpn)
        return context

    def _signed(self, subject, key, extension):
        now = dt.datetime.now(dt.UTC)
        day = dt.timedelta(days=1)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
            .add_extension(usage(isinstance(extension, x509.BasicConstraints)), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )


def as_general(name):
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def pem(certificate):
    return certificate.public_bytes(serialization.Encoding.PEM)

"""Scripted servers on real sockets, for tests of the HTTP client."""

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
        """Return a listening server that runs `script(connection)` on each connection."""
        server = Server(script or answer_with(OK), tls)
        await server.start()
        self._servers.append(server)
        return server

    def pool(self, **options):
        """Return a pool that trusts the authority, and resolves every host to this one."""
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


def answer_with(*answers):
    """Return a script that answers requests in turn, and repeats the last answer."""

    async def script(connection):
        turn = 0
        while await connection.request() is not None:
            await connection.send(answers[min(turn, len(answers) - 1)])
            turn += 1

    return script


class Server:
    """A server that sends raw bytes."""

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
        """Return the next request as (first line, headers, body), or None at the end."""
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
        await asyncio.sleep(0)  # drain() may not yield, and a flood would never see the close

    async def gone(self):
        """Wait until the client has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(1 << 16):
                pass


def usage(signs):
    """Return the key usage of a certificate, which Python 3.13 and later check."""
    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, key_cert_sign=signs, crl_sign=signs,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


class Authority:
    """A certificate authority for one test run."""

    def __init__(self):
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        self.certificate = self._signed(self._name, self._key, x509.BasicConstraints(True, None))

    def client(self):
        """Return a client context that trusts only this authority."""
        return ssl.create_default_context(cadata=pem(self.certificate).decode())

    def context(self, *names):
        """Return a server context with a certificate for these names and addresses."""
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

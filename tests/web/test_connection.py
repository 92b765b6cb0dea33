"""One connection: pipelined requests, bodies in tiny chunks, invalid heads, and its memory.

The protocol runs in this process with the test's application; memory is measured on a server.
"""

import asyncio
import contextlib
import gc
import itertools
import re
import socket
import struct
import threading
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
import uvloop
from uvicorn.server import ServerState

from tickwheel import SystemClock
from tickwheel.durable.time_slices import PAUSE_ITERATIONS
from tickwheel.web import protocol
from tickwheel.web.connection_limit import ConnectionLimit
from tickwheel.web.protocol import MAX_HEADERS, SLICE_BYTES
from tickwheel.web.route import ANSWER
from tickwheel.web.server import uvicorn_config
from tickwheel.web.tls import Certificate, Listener
from web.authority import Authority
from web.serving import PATIENCE, wait_until

GET = b"GET /%d HTTP/1.1\r\nHost: localhost\r\n\r\n"
READ = 256 << 10  # bytes that the loop reads at once, and so the maximum that may wait
MIB = 1 << 20
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"


class Line:
    """A connection to an application that records requests, and answers when allowed to."""

    def __init__(self, *, answer=b"ok", reads=False):
        self.answer = answer
        self.reads = reads
        self.asked = []
        self.bodies = []
        self.may = asyncio.Event()
        self.protocols = []
        self.connection_limit = ConnectionLimit(100, SystemClock())
        self.config, self.state = uvicorn_config(self, self.connection_limit), ServerState()
        self.config.load()

    async def __call__(self, scope, receive, send):
        self.asked.append(scope["path"])
        body, more = b"", self.reads
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        await self.may.wait()
        headers = [(b"content-length", str(len(self.answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.answer})

    def make(self):
        made = self.config.http_protocol_class(
            config=self.config, server_state=self.state, app_state={}
        )
        self.protocols.append(made)
        return made

    async def __aenter__(self):
        listener = socket.create_server(("127.0.0.1", 0))
        wire = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
        self.server = await asyncio.get_running_loop().create_server(self.make, sock=listener)
        wire.setblocking(False)
        await asyncio.get_running_loop().sock_connect(wire, self.server.sockets[0].getsockname())
        self.reader, self.writer = await asyncio.open_connection(sock=wire, limit=4096)
        return self

    async def __aexit__(self, *_):
        self.may.set()
        self.writer.transport.abort()
        self.server.close()
        await asyncio.gather(*self.state.tasks, return_exceptions=True)
        await until(lambda: not self.state.connections)

    @property
    def protocol(self):
        return self.protocols[0]

    async def answers(self, count):
        """Read `count` answers."""
        for _ in range(count):
            head = await self.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), head
            await self.reader.readexactly(len(self.answer))


async def until(condition):
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


async def turns(count=100):
    for _ in range(count):
        await asyncio.sleep(0)


def run(scenario, loop=None):
    """Run a coroutine function on a loop, with a timeout."""

    async def guarded():
        async with asyncio.timeout(PATIENCE):
            await scenario()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(guarded())


class TestPipelining:
    COUNT = 50_000

    def test_the_loop_runs_several_times_before_the_next_is_parsed(self):
        async def scenario():
            ticks, seen = 0, []

            async def tick():
                nonlocal ticks
                while True:
                    ticks += 1
                    await asyncio.sleep(0)

            class Asked(list):
                def append(self, path):
                    seen.append(ticks)

            async with Line() as line:
                line.asked = Asked()
                line.may.set()
                ticking = asyncio.ensure_future(tick())
                line.writer.write(b"".join(GET % n for n in range(20)))
                await line.answers(20)
                ticking.cancel()
            assert len(seen) == 20
            assert all(later - earlier > PAUSE_ITERATIONS for earlier, later in pairwise(seen))

        run(scenario)

    def test_nothing_is_parsed_or_read_until_the_first_is_answered(self):
        async def scenario():
            async with Line() as line:
                line.writer.write(b"".join(GET % n for n in range(self.COUNT)))
                await until(lambda: line.protocol.flow.read_paused)
                await turns()
                assert line.asked == ["/0"]
                assert not line.protocol.pipeline
                assert line.protocol.unread_bytes() <= READ
                assert line.protocol.flow.read_paused
                line.may.set()
                await line.answers(1000)
                assert line.asked[:1000] == [f"/{n}" for n in range(1000)]

        run(scenario)

    def test_all_are_answered_in_order_however_they_are_split(self):
        async def scenario():
            body = b"POST /%d HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n\r\n\r\n\r\n\r\nx"
            chunks = (
                b"POST /%d HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
                b"8\r\n\r\n\r\n\r\n\r\n\r\n1\r\nx\r\n0\r\nT: 1\r\n\r\n"
            )
            kinds = [GET, body, chunks, b"\r\n\r\n\r\n" + GET]
            text = b"".join(kinds[n % 4] % n for n in range(40))
            for size in (1, 2, 3, 5, 7, 64, 1000):
                async with Line(reads=True) as line:
                    line.may.set()
                    for place in range(0, len(text), size):
                        line.writer.write(text[place : place + size])
                        await asyncio.sleep(0)
                    await line.answers(40)
                    assert line.asked == [f"/{n}" for n in range(40)]
                    assert (
                        line.bodies == [b"", b"\r\n\r\n\r\n\r\nx", b"\r\n\r\n\r\n\r\nx", b""] * 10
                    )

        run(scenario)

    @pytest.mark.parametrize("late", [1, 4, 5])
    def test_the_next_is_not_parsed_with_the_end_of_the_first(self, late):
        async def scenario():
            async with Line() as line:
                first = GET % 1
                line.writer.write(first[:-late])
                await until(lambda: line.protocols and line.protocol.scope)
                line.writer.write(first[-late:] + GET % 2)
                await until(lambda: line.protocol.flow.read_paused)
                await turns()
                assert line.asked == ["/1"]
                assert not line.protocol.pipeline
                line.may.set()
                await line.answers(2)

        run(scenario)

    def test_the_next_is_not_handled_while_an_answer_is_unread(self):
        async def scenario():
            async with Line(answer=b"x" * 8 * MIB) as line:
                line.may.set()
                line.writer.write((GET % 1) * 50)
                await until(lambda: line.protocol.flow.write_paused)
                await turns()
                assert line.asked == ["/1"]
                await line.answers(3)
                assert 3 <= len(line.asked) <= 4

        run(scenario)

    def test_pipelined_requests_count_as_unread_bytes(self, monkeypatch):
        monkeypatch.setattr("tickwheel.web.connection_limit.MAX_UNREAD_BYTES", 1000)

        async def scenario():
            async with Line() as line:
                line.writer.write((GET % 1) * 100)
                assert await line.reader.read() == b""

        run(scenario)

    def test_an_unfinished_pipelined_request_times_out(self, monkeypatch):
        monkeypatch.setattr(protocol, "PATIENCE_SECONDS", 0.1)

        async def scenario():
            async with Line() as line:
                line.writer.write(GET % 1 + (GET % 2)[:20])
                await until(lambda: line.protocol.flow.read_paused)
                line.may.set()
                await line.answers(1)
                assert (await line.reader.read()).startswith(b"HTTP/1.1 408 ")

        run(scenario)

    def test_pipelined_requests_take_no_memory(self, serve):
        server = serve()
        server.get("/healthz", status=200)
        before = server.rss()
        one = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
        count = MIB // 2 // len(one)
        with server.connect() as wire:
            sending = threading.Thread(target=pour, args=(wire, one * count))
            sending.start()
            skip(wire, 500)
            assert server.rss() - before < 15 * MIB
            wire.shutdown(socket.SHUT_RDWR)
            sending.join()

    def test_after_a_reset_a_connection_is_freed(self):
        async def scenario():
            async with Line() as line:
                line.may.set()
                line.writer.write(GET % 0)
                await line.answers(1)
                wire = line.writer.get_extra_info("socket")
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                line.writer.transport.abort()
                await until(lambda: not line.state.connections)
                assert line.protocol.timeout_keep_alive_task is None

        run(scenario)


def pour(wire, data):
    """Send as much as the other side accepts."""
    with contextlib.suppress(OSError):
        wire.sendall(data)


def skip(wire, count):
    """Read `count` answers."""
    found, end = 0, b""
    while found < count:
        text = end + wire.recv(MIB)
        found += text.count(b'{"status":"ok"}')
        end = text[-14:]


class Whole(Line):
    """An application that answers in one call, if the connection accepts that."""

    def __init__(self, headers=(), **options):
        super().__init__(**options)
        self.headers = headers
        self.written = []
        self.may.set()

    async def __call__(self, scope, receive, send):
        headers = [(b"content-length", str(len(self.answer)).encode()), *self.headers]
        self.written.append(scope[ANSWER](200, headers, self.answer))
        if not self.written[-1]:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": self.answer})


class TestWholeAnswers:
    """An answer may be written in one call."""

    def test_it_is_the_same_answer(self):
        async def answer_of(line):
            async with line:
                line.may.set()
                line.writer.write(GET % 1)
                head = await line.reader.readuntil(b"\r\n\r\n")
                return re.sub(rb"date: .*\r\n", b"date: now\r\n", head)

        async def scenario():
            whole = Whole()
            assert await answer_of(whole) == await answer_of(Line())
            assert whole.written == [True]

        run(scenario)

    @pytest.mark.parametrize(
        "head",
        [
            b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
        ],
    )
    def test_one_without_a_body_or_before_a_close_is_left_to_the_other_way(self, head):
        async def scenario():
            async with Whole() as line:
                line.writer.write(head)
                got = await line.reader.readuntil(b"\r\n\r\n")
                assert got.startswith(b"HTTP/1.1 200 OK\r\n")
                assert (b"connection: close" in got) == (b"close" in head)
                assert line.written == [False]

        run(scenario)

    def test_one_that_follows_an_answer_that_nobody_reads_waits_for_its_reader(self):
        async def scenario():
            async with Whole(answer=b"x" * MIB) as line:
                for number in range(3):
                    line.writer.write(GET % number)
                await until(lambda: line.protocol.flow.write_paused)
                await turns()
                assert line.written == [True]
                await line.answers(3)

        run(scenario)

    @pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb"])
    def test_one_with_a_line_break_in_a_header_is_never_written(self, value):
        async def scenario():
            async with Whole([(b"x-name", value)]) as line:
                line.writer.write(GET % 1)
                got = await line.reader.read()
                assert got.startswith(b"HTTP/1.1 500 ")
                assert b"x-name" not in got
                assert line.written == []

        run(scenario)


class TestPieces:
    def test_a_chunked_body_does_not_wait_as_pipelined_requests_do(self):
        async def scenario():
            async with Line(reads=True) as line:
                line.connection_limit.pipelined = None
                line.may.set()
                head, chunks = POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 20_000
                line.writer.write(head + chunks + b"0\r\n\r\n")
                await line.answers(1)
                assert line.bodies == [b"x" * 20_000]

        run(scenario)

    def test_chunks_of_one_byte_do_not_block_others(self, monkeypatch):
        """A read of 256 KiB has 40,000 of them: parsing all at once would block the loop."""
        turn, parsed = 0, {}
        original = protocol.Protocol.on_body

        def on_body(self, body):
            parsed[turn] = parsed.get(turn, 0) + 1
            original(self, body)

        monkeypatch.setattr(protocol.Protocol, "on_body", on_body)

        async def scenario():
            nonlocal turn
            async with Line(reads=True) as line:
                line.may.set()
                head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
                line.writer.write(head + b"1\r\nx\r\n" * 100_000 + b"0\r\n\r\n")
                while not line.bodies:
                    turn += 1
                    await asyncio.sleep(0)
                await line.answers(1)
                assert line.bodies == [b"x" * 100_000]

        run(scenario)
        assert sum(parsed.values()) == 100_000
        assert max(parsed.values()) <= SLICE_BYTES / 6 + 1

    def test_while_chunks_wait_reading_is_paused(self):
        async def scenario():
            async with Line(reads=True) as line:
                head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
                line.writer.write(head)
                line.writer.write(b"1\r\nx\r\n" * 200_000)
                await until(lambda: line.asked)
                most = 0
                for _ in range(1000):
                    await asyncio.sleep(0)
                    most = max(most, line.protocol.unread_bytes())
                assert most <= READ + SLICE_BYTES

        run(scenario)

    @pytest.mark.parametrize("reads", [True, False], ids=["read", "unread_bytes"])
    def test_an_unread_body_is_not_buffered(self, reads):
        async def scenario():
            async with Line(reads=reads) as line:
                head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
                line.writer.write(head + b"400\r\n%s\r\n" % (b"x" * 1024) * 10_000)
                await until(lambda: line.asked)
                most = 0
                for _ in range(1000):
                    await asyncio.sleep(0)
                    most = max(most, len(line.protocol.cycle.body) + line.protocol.unread_bytes())
                assert most < 3 * READ

        run(scenario)

    def test_a_body_after_its_answer_is_skipped_up_to_a_limit(self, monkeypatch):
        monkeypatch.setattr(protocol, "MAX_DISCARDED_BYTES", 4 * MIB)

        async def scenario():
            async with Line() as line:
                line.may.set()
                line.writer.write(
                    b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 999999999\r\n\r\n"
                )
                await line.answers(1)
                sent = 0
                with contextlib.suppress(ConnectionError):
                    while sent < 64 * MIB:
                        line.writer.write(b"x" * MIB)
                        await line.writer.drain()
                        sent += MIB
                assert 4 * MIB <= sent < 64 * MIB

        run(scenario)

    def test_a_malformed_body_after_its_answer_gets_no_second_answer(self):
        async def scenario():
            async with Line() as line:
                line.may.set()
                head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
                line.writer.write(head)
                await line.answers(1)
                line.writer.write(b"no size\r\n")
                assert await line.reader.read() == b""

        run(scenario)

    def test_a_caller_that_reads_byte_by_byte_is_disconnected(self, monkeypatch):
        monkeypatch.setattr(protocol, "PATIENCE_SECONDS", 0.05)

        async def scenario():
            async with Line(answer=b"x" * 8 * MIB) as line:
                await until(lambda: line.protocols)
                left = itertools.count(8 * MIB, -1)  # a byte less each time
                wire = line.protocol._wire
                line.protocol._wire = SimpleNamespace(
                    get_write_buffer_size=lambda: next(left), abort=wire.abort
                )
                line.may.set()
                line.writer.write(GET % 1)
                await until(lambda: not line.state.connections)

        run(scenario)


class TestHeads:
    @pytest.fixture(scope="class")
    @staticmethod
    def answered():
        """Return the answer to a head, and whether the application was called."""

        def ask(head):
            async def scenario():
                nonlocal found
                async with Line() as line:
                    line.may.set()
                    line.writer.write(head)
                    found = await line.reader.readuntil(b"\r\n"), line.asked

            found = None
            run(scenario)
            return found

        return ask

    @pytest.mark.parametrize(
        ("status", "head"),
        [
            (400, b"GET / HTTP/1.1\r\n\r\n"),
            (400, b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n"),
            (505, b"GET / HTTP/2.0\r\nHost: a\r\n\r\n"),
            (505, b"GET / HTTP/2.0\r\n\r\n"),
            (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
            (400, b"GET / HTTP/3.0\r\nHost: a\r\n\r\n"),
            (400, b"GET / HTTP/1.2\r\nHost: a\r\n\r\n"),
            (400, b"GET / HTTP/0.9\r\nHost: a\r\n\r\n"),
            (400, b"GET /\r\n\r\n"),
            (400, b"GET http:// HTTP/1.1\r\nHost: a\r\n\r\n"),
            (400, b"GET http://a HTTP/1.1\r\nHost: a\r\n\r\n"),
            (400, POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
            (400, POST + b"Transfer-Encoding: gzip\r\n\r\n"),
            (400, POST + b"Transfer-Encoding: identity\r\n\r\n"),
            (400, b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
            (431, b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a:\r\n" * MAX_HEADERS + b"\r\n"),
            (431, b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a:\r\n" * 15_000 + b"\r\n"),
            (431, b"GET / HTTP/1.1\r\nHost: " + b"a" * 65_536 + b"\r\n\r\n"),
        ],
        ids=lambda value: re.sub(r"\W+", " ", str(value))[:60],
    )  # fmt: skip
    def test_an_ambiguous_head_is_refused(self, answered, status, head):
        line, asked = answered(head)
        assert line.startswith(b"HTTP/1.1 %d " % status)
        assert asked == []

    @pytest.mark.parametrize(
        "head",
        [
            b"GET / HTTP/1.0\r\n\r\n",
            POST + b"Transfer-Encoding: Chunked\r\n\r\n0\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost:\r\n" + b"a:\r\n" * (MAX_HEADERS - 1) + b"\r\n",
        ],
        ids=["1.0", "chunked", "many headers"],
    )
    def test_a_valid_head_is_accepted(self, answered, head):
        line, asked = answered(head)
        assert line.startswith(b"HTTP/1.1 200 ")
        assert asked == ["/"]


async def connect(address):
    """Return a TCP connection, without TLS."""
    wire = socket.socket()
    wire.setblocking(False)
    await asyncio.get_running_loop().sock_connect(wire, address)
    return wire


async def disconnect_in_handshake(wire, _):
    wire.close()


async def speak_no_tls(wire, _):
    await asyncio.get_running_loop().sock_sendall(wire, GET % 1)


async def lose_the_slot(_, address):
    (await connect(address)).close()


async def cut_body(line):
    line.writer.write(POST + b"Content-Length: 9\r\n\r\nx")
    await until(lambda: line.asked)


async def cut_next_head(line):
    line.may.set()
    line.writer.write(GET % 1)
    await line.answers(1)
    line.writer.write((GET % 2)[:9])
    await until(lambda: line.protocol.scope.get("method") is None)


async def wait_for_answer(line):
    line.writer.write(GET % 1)
    await until(lambda: line.asked)


async def send_invalid_url(line):
    line.writer.write(b"GET http:// HTTP/1.1\r\nHost: a\r\n\r\n")
    assert (await line.reader.read()).startswith(b"HTTP/1.1 400 ")


async def be_answered(line):
    await wait_for_answer(line)
    line.may.set()
    await line.answers(1)


async def queue_requests(line):
    line.writer.write((GET % 1) * 100)
    await until(lambda: line.protocol.flow.read_paused)


@pytest.mark.parametrize("loop", [asyncio, uvloop], ids=lambda one: one.__name__)
class TestFreed:
    """A lost connection is freed at once, without a garbage collection: TLS takes 256 KiB."""

    @pytest.fixture(autouse=True)
    def _without_collections(self):
        gc.collect()
        gc.disable()
        yield
        gc.enable()

    @pytest.mark.parametrize(
        "begin",
        [be_answered, cut_next_head, wait_for_answer, cut_body, queue_requests, send_invalid_url],
    )
    def test_after_a_request_or_in_the_middle_of_one(self, loop, begin):
        async def scenario():
            async with Line() as line:
                await until(lambda: line.protocols)
                await begin(line)
                lost = weakref.ref(line.protocols.pop())
                line.writer.transport.abort()
                line.may.set()
                await until(lambda: lost() is None)

        run(scenario, loop.new_event_loop)

    @pytest.mark.parametrize("end", [disconnect_in_handshake, speak_no_tls, lose_the_slot])
    def test_before_its_handshake_has_ended(self, loop, end, tmp_path, monkeypatch):
        monkeypatch.setattr("tickwheel.web.tls.HANDSHAKE_SECONDS", PATIENCE)
        authority = Authority(tmp_path)

        async def scenario():
            line, lost = Line(), []
            line.connection_limit.limit = 1
            context = Certificate(authority.cert, authority.key).context
            with socket.create_server(("127.0.0.1", 0)) as accepting:
                listener = Listener(accepting, context, line.connection_limit, line.make)
                wire = await connect(accepting.getsockname())
                await until(lambda: line.protocols)
                lost += map(weakref.ref, [*line.connection_limit.open, line.protocols.pop()])
                await end(wire, accepting.getsockname())
                await until(lambda: not any(one() for one in lost))
                wire.close()
                listener.close()
            assert len(lost) == 2

        run(scenario, loop.new_event_loop)


def test_a_server_refuses_them_too(serve):
    server = serve()
    for head in (b"GET /healthz HTTP/1.1\r\n\r\n", b"GET /healthz HTTP/2.0\r\nHost: a\r\n\r\n"):
        with server.connect() as wire:
            wire.sendall(head)
            assert wire.recv(12) in (b"HTTP/1.1 400", b"HTTP/1.1 505")
    wait_until(lambda: server.get("/healthz").status == 200, "it goes on")

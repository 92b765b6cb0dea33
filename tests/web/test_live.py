"""The stream of figures: what it has, who may read it, and what ends it."""

import asyncio
import json
import re

import pytest

from tickwheel.web import app as web_app
from tickwheel.web import live
from tickwheel.web.protocol import Cork
from web.serving import create_token, on_store, revoked


def events_of(body):
    """Return the messages of a stream, by name, each decoded."""
    found = {}
    for part in body.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in part.splitlines() if ": " in line)
        if "event" in fields:
            found.setdefault(fields["event"], []).append(json.loads(fields["data"]))
    return found


class Stream:
    """A raw connection that reads a stream."""

    def __init__(self, server, query="", token=None):
        self.socket = server.connect()
        headers = f"authorization: Bearer {token}\r\n" if token else ""
        host = "{}:{}".format(*server.address)
        request = f"GET /v1/live{query} HTTP/1.1\r\nhost: {host}\r\n{headers}\r\n"
        self.socket.sendall(request.encode())
        self.text = b""

    def until(self, wanted):
        """Read until the stream has had this text; an empty one: until its end."""
        while not wanted or wanted not in self.text:
            piece = self.socket.recv(65_536)
            if not piece:
                assert not wanted, self.text[-500:]
                break
            self.text += piece
        return self.text

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()


@pytest.fixture
def watch(api, monkeypatch):
    """Read a stream of some messages in this process, with turns that take no time."""
    monkeypatch.setattr(live, "TURN_SECONDS", 0.001)

    def read(query="limit=12", on_figures=None, **options):
        async def whole():
            reader = api.app
            sent = []
            held = asyncio.Event()

            async def receive():
                await held.wait()  # the reader does not disconnect

            async def send(message):
                sent.append(message)
                if on_figures is not None and b"event: figures" in message.get("body", b""):
                    await on_figures()

            headers = [(b"host", b"127.0.0.1:7380")]
            if "token" in options:
                headers.append((b"authorization", f"Bearer {options['token']}".encode()))
            scope = {
                "type": "http", "method": "GET", "path": "/v1/live",
                "query_string": query.encode(), "headers": headers,
            }  # fmt: skip
            await reader(scope, receive, send)
            return sent[0]["status"], b"".join(one["body"] for one in sent[1:])

        status, body = api.run(whole())
        return events_of(body) if status == 200 else status

    return read


class TestMessages:
    def test_a_stream_has_figures_counts_wheel_cluster_due_times_and_history(self, api, watch):
        api.service("mail", enabled=False)
        api.submit(delay=30)
        api.until(lambda: api.node.horizon.entries)
        found = watch()
        assert {"figures", "store", "wheel", "cluster", "due", "history"} <= found.keys()
        figures = found["figures"][-1]
        assert figures["stats"]["held"] == 1
        assert found["store"] == [{"live": 1, "final": 0}]
        assert figures["stats"]["services"]["mail"]["enabled"] is False
        assert sum(sum(level["counts"]) for level in found["wheel"][-1]["levels"]) == 1
        assert set(found["cluster"][0]["owners"]) == {api.node.name}
        assert [one["span"] for one in found["due"][0]] == ["minute", "hour", "day", "week"]
        assert [sum(one["counts"]) for one in found["due"][0]] == [1, 1, 1, 1]

    def test_rates_and_lateness_are_those_since_the_last_messages(self, api, watch, receiver):
        api.service("mail", receiver.url("/ok"))
        api.submit(delay=0)
        api.until(lambda: api.node.feedback.event_counts["finish"])

        async def submit():
            await api.asked("POST", "/v1/tasks", {"service": "mail"})

        figures = watch("limit=40", on_figures=submit)["figures"]
        assert figures[0]["rates"] == {}
        assert figures[0]["lateness"]["p50"] is None
        assert any(one["rates"]["submitted"] > 0 for one in figures[1:])
        assert any(one["lateness"]["p99"] is not None for one in figures[1:])

    def test_a_new_reader_gets_what_was_before(self, api, watch):
        watch()
        before = api.app.now_ms()
        (history,) = watch("limit=1")["history"]
        assert len(history["rows"]) >= 2
        assert history["at"] >= before

    def test_the_services_are_those_of_the_readers_namespace(self, api, watch):
        api.token("admin")
        for namespace in ("default", "shop"):
            admin = api.token("admin", namespace=namespace)
            api.service(f"of-{namespace}", token=admin)
        reader = api.token("read", namespace="shop")
        assert [*watch(token=reader)["figures"][0]["stats"]["services"]] == ["of-shop"]
        assert watch("namespace=default", token=reader) == 403
        anywhere = api.token("read")
        found = watch("namespace=shop&limit=12", token=anywhere)
        assert [*found["figures"][0]["stats"]["services"]] == ["of-shop"]

    def test_a_reader_of_one_namespace_sees_no_totals_of_others(self, api, watch):
        api.token("admin")
        for namespace in ("default", "shop"):
            api.service("mail", enabled=False, token=api.token("admin", namespace=namespace))
        for namespace in ("default", "default", "shop"):
            api.submit(delay=30, token=api.token("submit", namespace=namespace))
        reader = api.token("read", namespace="shop")
        found = watch("limit=12", token=reader)
        stats = found["figures"][-1]["stats"]
        assert (stats["submitted"], stats["submitted_here"]) == (1, 1)
        assert [stats[name] for name in ("held", "sent", "ended")] == [None] * 3
        assert stats["wheel"] == []
        assert not {"store", "wheel"} & found.keys()
        assert [sum(one["counts"]) for one in found["due"][0]] == [1, 1, 1, 1]
        anywhere = watch("limit=12", token=api.token("read"))
        stats = anywhere["figures"][-1]["stats"]
        assert (stats["submitted"], stats["submitted_here"]) == (3, 2)
        assert anywhere["store"] == [{"live": 3, "final": 0}]

    def test_after_an_idle_time_the_first_messages_are_new(self, api, watch, monkeypatch):
        monkeypatch.setattr(live, "COUNT_TURNS", 1)
        api.service("mail", enabled=False)
        watch()
        for _ in range(3):
            api.submit(delay=30)
        found = watch("limit=12")
        assert found["history"][0]["rows"]
        assert {count["live"] for count in found["store"]} == {3}
        assert {one["stats"]["submitted"] for one in found["figures"]} == {3}

    def test_other_servers_are_asked_for_the_readers_namespace_only(self, serve, postgres_url):
        anywhere = create_token(postgres_url, "read")
        one, _ = (serve(store=postgres_url) for _ in range(2))
        for namespace in ("default", "shop"):
            admin = create_token(postgres_url, "admin", namespace=namespace)
            one.service(f"of-{namespace}", token=admin)
        with Stream(one, "?namespace=shop", anywhere) as stream:
            answered = []
            while len(answered) < 2:
                stream.text = b""
                text = stream.until(b"event: due")
                data = re.findall(rb"event: figures\ndata: (.*)\n\n", text)
                stats = json.loads(data[-1])["stats"]
                assert {*stats["services"]} <= {"of-shop"}
                answered = [row for row in stats["by_node"] if row["error"] is None]

    def test_while_the_store_does_not_answer_the_stream_says_so(self, api, watch, monkeypatch):
        async def nodes():
            raise ConnectionError("the store is away")

        monkeypatch.setattr(api.scheduler, "nodes", nodes)
        assert watch("limit=2")["trouble"] == [{"detail": "the store is away"}]


class TestEnd:
    def test_the_sampler_stops_when_nobody_watches(self, api, watch):
        watch()
        assert api.app.live.streams == 0
        assert api.app.live._samplers[None]._running is None

    def test_one_sampler_serves_all_readers(self, api, watch, monkeypatch):
        reads = []
        merged = live.merged_figures

        async def counted(*arguments):
            reads.append(1)
            return await merged(*arguments)

        monkeypatch.setattr(live, "merged_figures", counted)

        async def several():
            async def one():
                chunks = []
                call = live.Call(api.app, access, {}, None, {}, "r", {})
                async for chunk in api.app.live.watch(call, 12):
                    chunks.append(chunk)
                return chunks

            access = api.app.guard.admit({}, 0)
            return await asyncio.gather(*(one() for _ in range(5)))

        found = api.run(several())
        figures = {len(events_of(b"".join(chunks)).get("figures", ())) for chunks in found}
        assert max(figures) >= 2
        assert len(reads) <= max(figures) + 1

    def test_a_full_server_refuses_further_streams(self, api, watch, monkeypatch):
        monkeypatch.setattr(live, "MAX_STREAMS", 0)
        assert watch() == 503

    def test_a_reader_that_disconnects_frees_its_stream(self, api):
        answer = api.get("/v1/live")  # its reader disconnects at once
        assert answer.media == "text/event-stream"
        assert api.app.live.streams == 0

    def test_a_reader_that_takes_nothing_is_dropped(self, api, monkeypatch):
        monkeypatch.setattr(web_app, "READER_SECONDS", 0.05)
        monkeypatch.setattr(live, "TURN_SECONDS", 0.001)

        async def stalled():
            async def never():
                await asyncio.Event().wait()

            async def send(message):
                if message["type"] == "http.response.body":
                    await never()

            scope = {
                "type": "http", "method": "GET", "path": "/v1/live", "query_string": b"",
                "headers": [(b"host", b"127.0.0.1:7380")],
            }  # fmt: skip
            async with asyncio.timeout(10):
                await api.app(scope, never, send)

        api.run(stalled())
        assert api.app.live.streams == 0

    def test_a_revoked_token_ends_its_stream(self, serve, sqlite_url):
        create_token(sqlite_url)
        token = create_token(sqlite_url, "read")
        server = serve()
        with Stream(server, token=token) as stream:
            stream.until(b"event: figures")
            on_store(sqlite_url, lambda store: revoked(store, token))
            assert stream.until(b"0\r\n\r\n")

    def test_a_stopping_server_ends_the_streams_at_once(self, serve):
        server = serve("--grace", "20")
        with Stream(server) as stream:
            stream.until(b"event: figures")
            server.signal()
            stream.until(b"0\r\n\r\n")
        assert server.wait() == 0


def test_a_chunk_is_written_at_once_and_not_with_the_next():
    written = []

    class Transport:
        is_closing = None
        write = staticmethod(written.append)

    cork = Cork(Transport())
    for data in (b"HTTP/1.1 200 OK\r\n\r\n", b"1\r\na\r\n", b"1\r\nb\r\n", b"0\r\n\r\n"):
        cork.write(data)
    assert written == [b"HTTP/1.1 200 OK\r\n\r\n1\r\na\r\n", b"1\r\nb\r\n", b"0\r\n\r\n"]


def test_due_times_are_counted_once_for_all_callers(mail, monkeypatch):
    mail.submit(delay=90)
    asked = []
    counts = mail.scheduler.due_counts

    async def counted(*arguments, **options):
        asked.append(1)
        return await counts(*arguments, **options)

    monkeypatch.setattr(mail.scheduler, "due_counts", counted)
    found = [mail.get("/v1/due?span=hour", status=200).json for _ in range(3)]
    assert found[0] == found[2]
    assert sum(found[0]["counts"]) == 1
    assert (len(found[0]["counts"]), found[0]["step"], found[0]["estimated"]) == (60, 60, [])
    assert len(asked) == 1
    mail.get("/v1/due?span=year").refused(422, "invalid")

"""The gRPC channel: its requests, the meaning of each status, addresses and TLS; on real sockets.

The tests of the contract are in tests/contracts.
"""

import asyncio
import contextlib
import os
import re
import socket
from pathlib import Path

import grpc
import pytest

from callees import Callee, aborting, accepting, finishing
from durable.channels.grpc.closing_server import ClosingServer
from durable.channels.http.calling import task
from durable.channels.http.dns import answering
from durable.stage import START, START_MS
from proxies import Proxy
from receivers import Receiver
from tickwheel.durable.channel import UNSENT
from tickwheel.durable.channels.grpc import calls as calls_module
from tickwheel.durable.channels.grpc.endpoint import TlsFiles
from tickwheel.durable.channels.http.target import Targets
from tickwheel.durable.permits.descriptors import limit
from tickwheel.errors import TargetRefused
from tickwheel.http import OpenConnections, Pool
from tickwheel.values.service import Service
from tickwheel.values.signature import new_secret, verify
from tickwheel.values.task import Event

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("watched")]

Code = grpc.StatusCode
PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "service-grpc.md"
BODY = '{"order": "ö-1", "price": 1.10}'.encode()


def service(endpoint, **options):
    return Service(options.pop("name", "orders"), "grpc", endpoint=endpoint, **options)


async def sent(channel, callee, **options):
    return await channel.send(task(), service(callee.endpoint, **options))


class TestTheRequest:
    async def test_it_has_the_payload_and_what_identifies_the_attempt(self, channel, callee):
        one = task(BODY, attempt=3, epoch=17, due_at_ms=START_MS + 45)
        await channel.send(one, service(callee.endpoint, name="shop/orders"))
        (request,) = callee.requests
        assert request.payload.encode() == BODY
        assert (request.task_id, request.service) == (one.id, "orders")
        assert (request.attempt, request.epoch) == (3, 17)
        assert request.due_at.ToMilliseconds() == START_MS + 45

    async def test_its_metadata_are_the_headers_of_a_call_over_http(self, channel, callee):
        one = task(attempt=3, epoch=17, due_at_ms=START_MS + 45)
        headers = (("X-Shop", "7"), ("authorization", "Bearer sesame-sesame"))
        await channel.send(one, service(callee.endpoint, headers=headers))
        (metadata,) = callee.metadata
        assert (
            metadata.items()
            >= {
                "webhook-id": one.id,
                "webhook-timestamp": str(int(START)),
                "tickwheel-service": "orders",
                "tickwheel-attempt": "3",
                "tickwheel-due-at": "2027-01-15T08:00:00.045Z",
                "tickwheel-epoch": "17",
                "x-shop": "7",
                "authorization": "Bearer sesame-sesame",
            }.items()
        )
        assert metadata["user-agent"].startswith("tickwheel/")
        assert "webhook-signature" not in metadata

    async def test_the_signature_covers_the_payload(self, channel, callee):
        secret = new_secret()
        await channel.send(task(BODY), service(callee.endpoint, secrets=(secret,)))
        (metadata,), (request,) = callee.metadata, callee.requests
        verify([secret], metadata, request.payload.encode(), now=START)

    async def test_its_deadline_is_the_timeout_of_the_attempt(self, channel, callee):
        await channel.send(task(timeout_ms=7_000), service(callee.endpoint, timeout=60.0))
        await channel.send(task(), service(callee.endpoint, timeout=None))
        assert 0 < callee.remaining[0] < 8  # gRPC rounds it up
        assert callee.remaining[1] is None or callee.remaining[1] > 1e6

    async def test_all_calls_of_a_service_use_one_connection(self, channel, callee):
        for _ in range(3):
            await sent(channel, callee)
        assert len(channel._calls._connections) == 1


# By status: whether the service counts as healthy, and whether a delay holds all its calls.
STATUSES = {
    Code.CANCELLED: (False, False),
    Code.UNKNOWN: (False, False),
    Code.INVALID_ARGUMENT: (True, False),
    Code.DEADLINE_EXCEEDED: (False, False),
    Code.NOT_FOUND: (True, False),
    Code.ALREADY_EXISTS: (True, False),
    Code.PERMISSION_DENIED: (True, False),
    Code.RESOURCE_EXHAUSTED: (True, True),
    Code.FAILED_PRECONDITION: (True, False),
    Code.ABORTED: (True, False),
    Code.OUT_OF_RANGE: (True, False),
    Code.UNIMPLEMENTED: (False, False),
    Code.INTERNAL: (False, False),
    Code.UNAVAILABLE: (False, True),
    Code.DATA_LOSS: (False, False),
    Code.UNAUTHENTICATED: (True, False),
}


def documented_statuses():
    """Return the table in the docs: by status, whether the service is well."""
    table = PAGE.read_text("utf-8").partition("<!-- grpc statuses -->")[2].partition("\n\n")[0]
    found = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        for name in re.findall(r"`([A-Z_]+)`", cells[0] if cells else ""):
            found[name] = cells[2] == "well"
    return found


class TestStatuses:
    async def test_the_table_in_the_docs_is_the_same(self):
        health = {code.name: healthy for code, (healthy, _) in STATUSES.items()}
        assert documented_statuses() == {"OK": True} | health
        assert {code for code, (_, holds) in STATUSES.items() if holds} == calls_module.HOLDING

    async def test_the_table_has_every_status_but_ok(self):
        assert {*STATUSES, Code.OK} == set(Code)

    @pytest.mark.parametrize("code", STATUSES, ids=lambda code: code.name)
    async def test_each_is_a_retry_that_tells_the_health(self, channel, callee, code):
        healthy, holds = STATUSES[code]
        callee.behave = aborting(code, "no room", retry_after=7)
        answer = await sent(channel, callee, timeout=None)
        assert (answer.event, answer.healthy) == (Event.RETRY, healthy)
        assert answer.error == f"127.0.0.1 answered {code.name}: no room"
        assert (answer.least_ms, answer.hold_ms) == (7_000, 7_000 if holds else None)

    async def test_without_retry_info_the_backoff_decides(self, channel, callee):
        callee.behave = aborting(Code.UNAVAILABLE)
        answer = await sent(channel, callee)
        assert (answer.least_ms, answer.hold_ms) == (None, None)
        assert answer.error == "127.0.0.1 answered UNAVAILABLE"

    async def test_a_delay_is_at_most_a_day_and_at_least_none(self, channel, callee):
        callee.behave = aborting(Code.UNAVAILABLE, retry_after=1e8)
        assert (await sent(channel, callee)).hold_ms == 24 * 3600 * 1000
        callee.behave = aborting(Code.UNAVAILABLE, retry_after=-1)
        assert (await sent(channel, callee)).hold_ms == 0

    async def test_details_that_cannot_be_read_are_ignored(self, channel, callee):
        callee.behave = aborting(Code.UNAVAILABLE, details=b"\xff\xff\xff")
        assert (await sent(channel, callee)).hold_ms is None

    async def test_a_callee_that_is_too_slow_is_a_failure(self, channel, callee):
        callee.hangs()
        answer = await sent(channel, callee, timeout=0.05)
        assert (answer.event, answer.healthy) == (Event.RETRY, False)
        assert answer.error == "timed out after 0.05 s"

    async def test_an_error_shows_no_secret(self, channel, callee):
        secret, header = new_secret(), ("x-key", "open-sesame")
        callee.behave = aborting(Code.INTERNAL, f"got {secret} and open-sesame\n\tthere")
        answer = await sent(channel, callee, secrets=(secret,), headers=(header,))
        assert answer.error == "127.0.0.1 answered INTERNAL: got ******** and ******** there"

    async def test_accepted_means_running_until_feedback(self, channel, callee):
        callee.behave = accepting
        answer = await sent(channel, callee, feedback_timeout=90.0)
        assert (answer.event, answer.after_ms, answer.healthy) == (Event.ACCEPT, 90_000, True)

    @pytest.mark.parametrize("result", ["{", "NaN", "x" * 70_000, "[" * 300 + "]" * 300])
    async def test_a_result_that_cannot_be_stored_is_dropped(self, channel, callee, result):
        callee.behave = finishing(result)
        answer = await sent(channel, callee)
        assert (answer.event, answer.result_body) == (Event.FINISH, None)

    async def test_a_response_beyond_all_bounds_fails_the_attempt(self, channel, callee):
        callee.behave = finishing('"' + "x" * calls_module.MAX_RESPONSE_BYTES + '"')
        answer = await sent(channel, callee)
        assert answer.event is Event.RETRY
        assert "larger than max" in answer.error


class TestConnections:
    async def test_a_callee_that_is_down_is_named_without_its_address(self, make_channel):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        targets = Targets(allow_private=True, lookup=answering(["127.0.0.1"]))
        answer = await make_channel(targets=targets).send(
            task(), service(f"grpc://orders.example:{port}")
        )
        assert (answer.event, answer.healthy) == (Event.RETRY, False)
        assert answer.error.startswith(f"cannot connect to orders.example:{port}: ")
        assert "refused" in answer.error
        assert "127.0.0.1" not in answer.error

    async def test_permission_is_asked_after_the_connection_was_opened(self, channel, callee):
        states = []

        def may_send():
            (connection,) = channel._calls._connections.values()
            states.append(connection._channel.get_state())
            return False

        assert await channel.send(task(), service(callee.endpoint), may_send) is UNSENT
        assert states == [grpc.ChannelConnectivity.READY]

    async def test_a_proxy_of_the_environment_is_not_used(self, channel, callee, monkeypatch):
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
        assert (await sent(channel, callee)).event is Event.FINISH

    async def test_a_private_address_is_refused_unless_it_is_allowed(self, make_channel, callee):
        targets = Targets(lookup=answering(["127.0.0.1"]))
        channel = make_channel(targets=targets)
        answer = await channel.send(task(), service(f"grpc://orders.example:{callee.port}"))
        assert (answer.event, answer.healthy) == (Event.RETRY, False)
        assert "orders.example must not be called" in answer.error
        assert callee.requests == []

    async def test_the_call_goes_to_the_address_that_was_checked(self, make_channel, callee):
        log = []
        targets = Targets(allow_private=True, lookup=answering(["127.0.0.1"], log=log))
        channel = make_channel(targets=targets)
        answer = await channel.send(task(), service(f"grpc://orders.example:{callee.port}"))
        assert answer.event is Event.FINISH
        assert log == ["orders.example"]  # gRPC itself looked nothing up: there is no such name

    @pytest.mark.parametrize(
        ("host", "addresses"),
        [
            ("127.0.0.1", ["::1", "127.0.0.1"]),
            ("[::1]", ["127.0.0.1", "::1"]),
            ("[::1]", ["127.0.0.2", "127.0.0.1", "::1"]),
        ],
    )
    async def test_all_addresses_are_tried_of_both_families(self, make_channel, host, addresses):
        log = []
        targets = Targets(allow_private=True, lookup=answering(addresses, log=log))
        with Callee(host=host) as callee:
            there = service(f"grpc://orders.example:{callee.port}")
            assert (await make_channel(targets=targets).send(task(), there)).event is Event.FINISH
        assert log == ["orders.example"]

    async def test_an_address_that_does_not_answer_does_not_hold_up_the_others(self, make_channel):
        targets = Targets(allow_private=True, lookup=answering(["::1", "127.0.0.1"]))
        with Callee() as callee, contextlib.ExitStack() as stack:
            full = stack.enter_context(socket.socket(socket.AF_INET6))
            full.bind(("::1", callee.port))
            full.listen(0)
            for _ in range(4):  # the kernel drops what does not fit into the queue
                waiting = stack.enter_context(socket.socket(socket.AF_INET6))
                waiting.setblocking(False)
                waiting.connect_ex(("::1", callee.port))
            there = service(f"grpc://orders.example:{callee.port}", timeout=None)
            assert (await make_channel(targets=targets).send(task(), there)).event is Event.FINISH

    async def test_only_the_permitted_addresses_are_tried(self, make_channel, callee):
        targets = Targets(allow=["::1/128"], lookup=answering(["::1", "127.0.0.1"]))
        there = service(f"grpc://orders.example:{callee.port}")
        answer = await make_channel(targets=targets).send(task(), there)
        assert "cannot connect to orders.example" in answer.error
        assert callee.requests == []

    async def test_a_name_that_leads_elsewhere_gets_a_new_connection(self, make_channel, callee):
        addresses = [["127.0.0.2"], ["127.0.0.1"]]
        now = FrozenClock()
        targets = Targets(allow_private=True, lookup=answering(*addresses), clock=now)
        channel = make_channel(targets=targets)
        there = service(f"grpc://orders.example:{callee.port}")
        assert (await channel.send(task(), there)).event is Event.RETRY
        now.seconds += 10
        assert (await channel.send(task(), there)).event is Event.FINISH
        assert len(channel._calls._connections) == 1
        assert not channel._calls._retired

    async def test_a_retired_connection_ends_with_its_last_call(self, make_channel, callee):
        addresses = [["127.0.0.1"], ["127.0.0.1", "127.0.0.3"]]
        now = FrozenClock()
        targets = Targets(allow_private=True, lookup=answering(*addresses), clock=now)
        channel = make_channel(targets=targets)
        there = service(f"grpc://orders.example:{callee.port}")
        callee.hangs()
        first = asyncio.create_task(channel.send(task(), there))
        while not callee.requests:
            await asyncio.sleep(0.001)
        now.seconds += 10
        second = asyncio.create_task(channel.send(task(), there))
        while len(callee.requests) < 2:
            await asyncio.sleep(0.001)
        assert len(channel._calls._retired) == 1
        callee.release()
        assert [(await first).event, (await second).event] == [Event.FINISH, Event.FINISH]
        assert not channel._calls._retired

    async def test_after_a_timeout_the_next_call_gets_a_new_connection(self, channel, callee):
        peers = []

        def hang(request, context):
            peers.append(context.peer())
            if len(peers) == 1:
                context.abort(Code.DEADLINE_EXCEEDED, "as if nobody were there")
            return finishing()(request, context)

        callee.behave = hang
        for _ in range(3):
            await sent(channel, callee, timeout=None)
        assert peers[0] != peers[1] == peers[2]

    async def test_after_a_cancelled_call_the_next_one_gets_a_new_connection(self, channel, callee):
        callee.hangs()
        first = asyncio.create_task(sent(channel, callee))
        while not callee.requests:
            await asyncio.sleep(0.001)
        (before,) = channel._calls._connections.values()
        first.cancel()
        await asyncio.wait([first])
        assert not channel._calls._connections
        callee.release()
        callee.behave = finishing()
        assert (await sent(channel, callee)).event is Event.FINISH
        assert [*channel._calls._connections.values()] != [before]

    async def test_a_request_that_a_closing_server_refused_is_sent_again(self, channel):
        async with ClosingServer() as server:
            answer = await channel.send(task(), service(server.endpoint))
        assert answer.event is Event.FINISH
        assert server.connections == 2

    async def test_an_idle_connection_is_closed(self, channel, callee, monkeypatch):
        monkeypatch.setattr(calls_module, "IDLE_MS", 1_000)
        await sent(channel, callee)
        (connection,) = channel._calls._connections.values()
        await connection._channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        assert connection._channel.get_state() is grpc.ChannelConnectivity.IDLE
        assert (await sent(channel, callee)).event is Event.FINISH

    async def test_a_connection_that_was_cut_while_idle_costs_no_attempt(self, channel, callee):
        with Proxy(callee.port) as proxy:
            there = service(f"grpc://127.0.0.1:{proxy.port}")
            await channel.send(task(), there)
            (connection,) = channel._calls._connections.values()
            proxy.cut()
            await connection._channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            assert (await channel.send(task(), there)).event is Event.FINISH

    async def test_a_peer_that_vanishes_during_a_call_is_noticed(
        self, channel, callee, monkeypatch
    ):
        monkeypatch.setattr(calls_module, "KEEPALIVE_MS", 500)
        monkeypatch.setattr(calls_module, "KEEPALIVE_TIMEOUT_MS", 500)
        callee.hangs()
        with Proxy(callee.port) as proxy:
            there = service(f"grpc://127.0.0.1:{proxy.port}", timeout=None)
            call = asyncio.create_task(channel.send(task(), there))
            while not callee.requests:
                await asyncio.sleep(0.001)
            proxy.silent = True
            async with asyncio.timeout(30):  # gRPC's own limit is a minute
                answer = await call
            proxy.heal()
        assert (answer.event, answer.healthy) == (Event.RETRY, False)

    async def test_data_that_nobody_confirms_close_the_connection(self, channel, callee):
        await sent(channel, callee)
        assert user_timeouts(callee.port) == [calls_module.KEEPALIVE_TIMEOUT_MS]

    async def test_pings_are_rarer_than_servers_allow_by_default(self):
        assert calls_module.KEEPALIVE_MS > 5 * 60_000

    async def test_there_are_no_more_connections_than_calls_may_be_under_way(
        self, make_channel, callee
    ):
        channel = make_channel()
        for number in range(12):
            await channel.send(task(), service(f"grpc://127.0.0.{number + 1}:{callee.port}"))
        assert len(channel._calls._connections) == channel.semaphore(None).permits == 10
        assert limit() > 10

    async def test_a_new_connection_closes_those_that_were_long_unused(self, channel, callee):
        there = [service(f"grpc://127.0.0.{number}:{callee.port}") for number in range(1, 5)]
        for one in there[:3]:
            await channel.send(task(), one)
        first, second, third = channel._calls._connections.values()
        for one in (first, second):
            one.used_at -= calls_module.IDLE_MS / 1000
        second.users += 1
        await channel.send(task(), there[3])
        assert [*channel._calls._connections.values()][:2] == [second, third]
        assert len(channel._calls._connections) == 3
        second.users -= 1

    async def test_idle_connections_over_http_make_room_for_calls_over_grpc_and_back(
        self, make_channel
    ):
        shared = OpenConnections(3)
        channel, pool = make_channel(connections=shared), Pool(total=shared)
        with Receiver() as receiver, Callee(host="0.0.0.0") as callee:
            for number in range(9):
                endpoint = f"grpc://127.0.0.{number + 1}:{callee.port}"
                assert (await channel.send(task(), service(endpoint))).event is Event.FINISH
                await pool.request("POST", receiver.url())
                assert pool.stats()["connections"] == 1
                assert len(channel._calls._connections) == min(number + 1, 2)
                assert shared.open == min(number + 2, 3)
            await channel.close()
            await pool.close()
        assert shared.open == 0


def user_timeouts(port):
    """Return the TCP_USER_TIMEOUT of each connection of this process to a port."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since, or a listener
            if path.readlink().name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as one:
                    if one.family != socket.AF_UNIX and one.getpeername()[1] == port:
                        option = socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
                        found.append(one.getsockopt(*option))
    return found


class FrozenClock:
    """A clock that a test sets."""

    seconds = 0.0

    def time(self):
        return self.seconds


class TestTls:
    def credentials(self, authority, *, mutual=False):
        pair = authority.key.read_bytes(), authority.cert.read_bytes()
        ca = authority.ca.read_bytes() if mutual else None
        return grpc.ssl_server_credentials([pair], ca, mutual)

    async def test_a_certificate_of_the_authority_is_trusted(self, make_channel, authority):
        with Callee(self.credentials(authority)) as callee:
            channel = make_channel(tls=TlsFiles(authority.ca))
            assert (await sent(channel, callee)).event is Event.FINISH

    async def test_any_other_certificate_is_refused(self, make_channel, authority):
        with Callee(self.credentials(authority)) as callee:
            answer = await sent(make_channel(), callee)
        assert (answer.event, answer.healthy) == (Event.RETRY, False)
        assert "certificate" in answer.error.lower()

    async def test_the_certificate_must_be_for_the_name_in_the_endpoint(
        self, make_channel, authority
    ):
        targets = Targets(allow_private=True, lookup=answering(["127.0.0.1"]))
        with Callee(self.credentials(authority)) as callee:
            channel = make_channel(targets=targets, tls=TlsFiles(authority.ca))
            answer = await channel.send(task(), service(f"grpcs://orders.example:{callee.port}"))
        assert answer.event is Event.RETRY
        assert callee.requests == []

    async def test_a_callee_may_want_a_certificate_too(self, make_channel, authority, tls_files):
        with Callee(self.credentials(authority, mutual=True)) as callee:
            without = await sent(make_channel(tls=TlsFiles(authority.ca)), callee)
            assert without.event is Event.RETRY
            assert callee.requests == []
            assert (await sent(make_channel(tls=tls_files), callee)).event is Event.FINISH

    async def test_a_file_that_does_not_exist_is_named(self, make_channel, tmp_path):
        channel = make_channel(tls=TlsFiles(tmp_path / "none.pem"))
        with pytest.raises(OSError, match=r"none\.pem"):
            channel.check(service("grpcs://orders.example:443"))


class TestChecks:
    @pytest.mark.parametrize(
        ("endpoint", "message"),
        [
            ("http://orders.example:80", "must start with grpc:// or grpcs://"),
            ("grpc://orders.example", "must have a port"),
            ("grpcs://orders.example:443/path", "nothing after its port"),
            ("grpc://orders.example:443?x=1", "nothing after its port"),
            ("grpc://user:pass@orders.example:443", "no user or password"),
            ("grpc://:443", "must have a host"),
            ("grpc://169.254.169.254:80", "a cloud's metadata service"),
        ],
    )
    async def test_an_endpoint_is_a_host_and_a_port(self, channel, endpoint, message):
        with pytest.raises(TargetRefused, match=message):
            channel.check(service(endpoint))

    @pytest.mark.parametrize("name", ["x-key-bin", "grpc-timeout", "x+y", "te", "webhook-id"])
    async def test_a_header_must_be_possible_as_metadata(self, channel, name):
        with pytest.raises(ValueError, match=f"{name.replace('+', '.')}.*(metadata|reserved)"):
            channel.check(service("grpc://orders.example:443", headers=((name, "1"),)))

    async def test_a_secret_must_be_usable(self, channel):
        with pytest.raises(ValueError, match="secret"):
            channel.check(service("grpc://orders.example:443", secrets=("short",)))

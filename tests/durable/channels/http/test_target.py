"""Targets: what must not be called is refused, however it is written and whenever DNS changes."""

import asyncio
import contextlib
import socket
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.channels.http.dns import PUBLIC, UNANSWERED, UNKNOWN, answering, entry
from receivers import Receiver
from tickwheel import ManualClock
from tickwheel.durable.channels.http import lookups, target
from tickwheel.durable.channels.http.target import (
    FRESH_SECONDS,
    MAX_NAMES,
    STALE_SECONDS,
    Targets,
)
from tickwheel.errors import TargetRefused
from tickwheel.http import Address, Pool
from tickwheel.http.url import parse

pytestmark = pytest.mark.usefixtures("watched")


LOOPBACK = ["127.0.0.1", "127.0.0.2", "127.255.255.254", "[::1]", "[0:0:0:0:0:0:0:1]", "localhost",
            "LOCALHOST", "localhost.", "api.localhost"]  # fmt: skip
DISGUISED = ["2130706433", "017700000001", "0x7f000001", "0x7F.1", "127.1", "127.0.1", "0177.0.0.1",
             "0x7f.0.0.1", "0177.0x0.0.1", "127.0.0.1.", "0", "0x0", "00.0.0.0", "3232235521",
             "0xa9fea9fe", "2852039166", "0251.0376.0251.0376", "169.254.43518",
             "\uff11\uff12\uff17.\uff10.\uff10.\uff11", "①②⑦.⓪.⓪.①", "127。0。0。1",
             "ⓛocalhost"]  # fmt: skip
PRIVATE = ["10.0.0.0", "10.255.255.255", "172.16.0.1", "172.31.255.255", "192.168.0.1",
           "[fc00::1]", "[fd12:3456:789a::1]", "[fec0::1]", "[feff::1]"]  # fmt: skip
LINK_LOCAL = ["169.254.0.1", "169.254.255.254", "[fe80::1]", "[febf::1]"]
SCOPED = ["[fe80::1%25eth0]", "[fe80::1%eth0]", "[fe80::1%1]", "[2606:4700::1111%251]"]
OTHER = ["0.0.0.0", "0.1.2.3", "100.64.0.1", "100.127.255.255", "192.0.0.1", "192.0.2.1",
         "192.88.99.1", "198.18.0.1", "198.19.255.255", "198.51.100.7", "203.0.113.9", "224.0.0.1",
         "239.255.255.255", "240.0.0.1", "255.255.255.255", "[::]", "[100::1]", "[2001:2::1]",
         "[2001:10::1]", "[2001:20::1]", "[2001:db8::1]", "[3fff::1]", "[5f00::1]", "[4000::1]",
         "[ff02::1]", "[ff0e::1]", "[1::1]"]  # fmt: skip
EMBEDDED = ["[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::FFFF:10.0.0.1]", "[::ffff:8.8.8.8]",
            "[::127.0.0.1]", "[::10.0.0.1]", "[::8.8.8.8]", "[::ffff:0:127.0.0.1]",
            "[64:ff9b::127.0.0.1]", "[64:ff9b::10.0.0.1]", "[64:ff9b:1::10.0.0.1]",
            "[64:ff9b:1:a00:1::]", "[2002:7f00:1::]", "[2002:a00:1::1]", "[2002:808:808::]",
            "[2001:0:4136:e378:8000:63bf:3fff:fdd2]", "[2001:0:7f00:1::]",
            "[2606:4700::5efe:7f00:1]", "[2606:4700::200:5efe:10.0.0.1]"]  # fmt: skip
V4_METADATA = ["169.254.169.254", "169.254.170.2", "169.254.170.23", "100.100.100.200",
               "168.63.129.16", "192.0.0.192"]  # fmt: skip
V6_METADATA = ["fd00:ec2::254", "fd20:ce::254", "fd00:ec2::23", "fe80::a9fe:a9fe"]


def embedded(v4):
    """An IPv4 address in each of the forms in which IPv6 can hide it."""
    number, turned = int(ip_address(v4)), int(ip_address(v4)) ^ 0xFFFFFFFF
    high, low = f"{number >> 16:x}", f"{number & 0xFFFF:x}"
    first, middle, last = f"{number >> 24:x}", f"{number >> 8 & 0xFFFF:x}", number & 0xFF
    bytes_ = number.to_bytes(4, "big")
    return {
        "mapped": f"::ffff:{v4}",
        "compatible": f"::{v4}",
        "translated": f"::ffff:0:{v4}",
        "nat64": f"64:ff9b::{v4}",
        "local nat64, 96": f"64:ff9b:1:2:3:4:{high}:{low}",
        "local nat64, 64": f"64:ff9b:1:2:{first}:{middle}:{last << 8:x}:0",
        "local nat64, 56": f"64:ff9b:1:{0x200 | bytes_[0]:x}:{bytes_[1]:x}:{bytes_[2]:02x}"
        f"{bytes_[3]:02x}:0:0",
        "local nat64, 48": f"64:ff9b:1:{high}:{bytes_[2]:x}:{bytes_[3] << 8:x}:0:0",
        "6to4": f"2002:{high}:{low}::1",
        "teredo client": f"2001:0:808:808:0:0:{turned >> 16:x}:{turned & 0xFFFF:x}",
        "teredo server": f"2001:0:{high}:{low}:0:0:f7f7:f7f7",
        "isatap": f"2606:4700::5efe:{high}:{low}",
    }


METADATA = [*V4_METADATA, *(f"[{one}]" for one in V6_METADATA)]
METADATA += [f"[{form}]" for v4 in V4_METADATA for form in embedded(v4).values()]
METADATA += ["0xa9fea9fe", "2852039166", "metadata.google.internal", "METADATA.google.internal.",
             "metadata.goog"]  # fmt: skip

REFUSED = LOOPBACK + DISGUISED + PRIVATE + LINK_LOCAL + SCOPED + OTHER + EMBEDDED + METADATA
PUBLIC_HOSTS = ["93.184.215.14", "8.8.8.8", "134744072", "1.1.1.1", "172.15.0.1", "172.32.0.1",
                "192.167.1.1", "100.63.1.1", "100.128.1.1", "11.0.0.1", "223.255.255.255",
                "[2606:4700:4700::1111]", "[2a00:1450::1]", "example.com", "EXAMPLE.com.",
                "my_service.example", "bücher.example", "xn--bcher-kva.example", "10.example.com",
                "localhost.example"]  # fmt: skip


def permitted(targets, urls):
    """The URLs that may be endpoints."""
    found = []
    for url in urls:
        with contextlib.suppress(TargetRefused):
            targets.check_endpoint(url)
            found.append(url)
    return found


def endpoints(hosts):
    shapes = ("http://{}/hook", "https://{}:8443", "HTTP://{}?a=b")
    return [shape.format(host) for host in hosts for shape in shapes]


class TestEndpoints:
    def test_what_is_not_public_is_refused(self):
        assert permitted(Targets(), endpoints(REFUSED)) == []

    def test_what_is_public_is_permitted(self):
        assert permitted(Targets(), endpoints(PUBLIC_HOSTS)) == endpoints(PUBLIC_HOSTS)

    @pytest.mark.parametrize(
        "url",
        [
            "ftp://example.com/",
            "file:///etc/passwd",
            "gopher://example.com:70/_x",
            "ws://example.com/",
            "javascript:alert(1)",
            "//example.com/",
            "example.com",
            "http:example.com",
            "http:/example.com",
            "httpss://example.com",
            "unix:/run/docker.sock",
            "",
        ],
    )
    def test_other_schemes_are_refused(self, url):
        with pytest.raises(TargetRefused, match=r"start with http:// or https://.*protocol"):
            Targets(allow_private=True).check_endpoint(url)

    @pytest.mark.parametrize(
        "url",
        [
            "http://user@example.com/",
            "http://user:hunter2@example.com/",
            "http://example.com@127.0.0.1/",
            "http://:@example.com/",
            "http://@example.com/",
            "http://a@b@example.com/",
        ],
    )
    def test_a_user_or_a_password_is_refused_and_not_shown(self, url):
        with pytest.raises(TargetRefused, match="no user or password") as refused:
            Targets(allow_private=True).check_endpoint(url)
        assert "hunter2" not in str(refused.value)

    @pytest.mark.parametrize(
        "url",
        [
            "http://",
            "http:///path",
            "http://?a",
            "http://:80/",
            "http://example.com:/",
            "http://example.com:0/",
            "http://example.com:65536/",
            "http://example.com:-1/",
            "http://example.com:8a/",
            "http://example.com:80:80/",
            "http://example.com:٨٠/",
            "http://example.com/#fragment",
            "http://example.com#@127.0.0.1/",
            "http://example.com\\@127.0.0.1/",
            "http://example.com /",
            " http://example.com/",
            "http://example.com/\r\nx: y",
            "http://exam\tple.com/",
            "http://exam\x00ple.com/",
            "http://[::1/",
            "http://::1/",
            "http://[2606:4700::1]evil/",
            "http://x[2606:4700::1]/",
            "http://[example.com]/",
            "http://[8.8.8.8]/",
            "http://[v1.a]/",
            "http://[]/",
            "http://%31%32%37.0.0.1/",
            "http://example.com%00.evil/",
            "http://1.2.3.4.5/",
            "http://256.1.1.1/",
            "http://1.2.3.08/",
            "http://a..b/",
            "http://.example.com/",
            "http://example.com../",
            "http://" + "a" * 64 + ".com/",
            "http://" + "a." * 127 + "com/",
            "http://ex*mple.com/",
            "http://example.com,127.0.0.1/",
            "http://\ud800.com/",
            "http://example.com/\udfff",
            "http://example.com/" + "x" * 2048,
        ],
        ids=ascii,
    )
    def test_ambiguous_urls_are_refused(self, url):
        with pytest.raises(TargetRefused):
            Targets(allow_private=True).check_endpoint(url)

    @given(
        scheme=st.sampled_from(["http://", "https://", "HTTP://", "http:/", "http:\\\\"]),
        rest=st.lists(
            st.sampled_from(
                ["example.com", "127.0.0.1", "8.8.8.8", "[2606:4700::1]", "bücher", "0x7f", ".",
                 ":", "80", "@", "/", "?", "#", "[", "]", "%", "%20", "\\", " ", "。", "ß",
                 "\t", "-"]
            ),
            max_size=6,
        ),
    )  # fmt: skip
    def test_the_client_reads_the_same_host_from_a_permitted_url(self, scheme, rest):
        url = scheme + "".join(rest)
        try:
            Targets(allow_private=True).check_endpoint(url)
        except TargetRefused:
            return
        host = target.normalize_host(parse(url).host)
        assert target.literal_of(host) == target.literal_of(target.host_of(url))
        if target.literal_of(host) is None:
            assert host == target.host_of(url)

    def test_the_message_names_the_host_and_why_and_not_the_rest(self):
        with pytest.raises(TargetRefused, match=r"^10\.0\.0\.1 .* private \(see --allow"):
            Targets().check_endpoint("http://10.0.0.1/hunter2?token=hunter2")

    @pytest.mark.parametrize("url", [None, 7, b"http://example.com"])
    def test_a_url_that_is_not_text_is_a_type_error(self, url):
        with pytest.raises(TypeError, match="must be a str"):
            Targets().check_endpoint(url)


class TestAllowing:
    def test_metadata_is_refused_whatever_is_allowed(self):
        targets = Targets(allow_private=True, allow=["0.0.0.0/0", "::/0"])
        assert permitted(targets, endpoints(METADATA)) == []

    def test_private_ones_can_all_be_allowed(self):
        private = endpoints([*LOOPBACK, *PRIVATE, *EMBEDDED, "2130706433", "0x7f.1"])
        assert permitted(Targets(allow_private=True), private) == private

    def test_an_allowed_network_allows_nothing_else(self):
        targets = Targets(allow=["10.1.0.0/16", ip_network("fd00:1::/32")])
        for host in ("10.1.2.3", "[fd00:1::5]", "167838211"):
            targets.check_endpoint(f"http://{host}/")
        for host in ("10.2.0.1", "127.0.0.1", "[fd00:2::5]", "[::ffff:10.1.2.3]"):
            with pytest.raises(TargetRefused):
                targets.check_endpoint(f"http://{host}/")

    @pytest.mark.parametrize("one", ["127.0.0.1", "::1"])
    def test_the_name_localhost_goes_with_loopback(self, one):
        Targets(allow=[one]).check_endpoint("http://localhost:8000/")

    def test_an_allowed_tunnel_to_ipv4_must_lead_to_a_permitted_address(self):
        targets = Targets(allow=["64:ff9b::/96", "64:ff9b:1::/48", "2001::/32"])
        for host in ("64:ff9b::8.8.8.8", "64:ff9b:1::8.8.8.8", "2001:0:808:808::f7f7:f7f7"):
            targets.check_endpoint(f"http://[{host}]/")
        for form in ("nat64", "local nat64, 96", "teredo client", "teredo server"):
            with pytest.raises(TargetRefused):
                targets.check_endpoint(f"http://[{embedded('10.0.0.1')[form]}]/")
        both = Targets(allow=["64:ff9b::/96", "10.0.0.0/8"])
        both.check_endpoint("http://[64:ff9b::10.0.0.1]/")

    @pytest.mark.parametrize("cidr", ["10.0.0.1/8", "private", "", "10.0.0.0/33", "::/129"])
    def test_the_error_for_an_invalid_network_shows_a_valid_one(self, cidr):
        with pytest.raises(ValueError, match=r"such as 10\.1\.0\.0/16"):
            Targets(allow=[cidr])


@pytest.mark.asyncio
class TestResolving:
    async def test_what_is_refused_as_an_endpoint_is_never_resolved(self):
        targets = Targets(lookup=answering(["127.0.0.1", "::1"]))  # for the name localhost
        resolved = []
        for host in REFUSED:
            with contextlib.suppress(TargetRefused):
                resolved.append((host, await targets.resolve(host, 80)))
        assert resolved == []

    @pytest.mark.parametrize(
        "host", ["127.0.0.1", "2130706433", "0x7f000001", "0x7f.1", "127.1", "0177.0.0.1",
                 "017700000001", "localhost", "0"]
    )  # fmt: skip
    async def test_addresses_from_the_systems_resolver_are_refused_too(self, host):
        found = await lookups.Lookups()(host, 80)
        targets = Targets(lookup=answering([one[4][0] for one in found]))
        assert found
        with pytest.raises(TargetRefused, match=r"loopback|unspecified"):
            await targets.resolve("innocent.example", 80)

    @pytest.mark.parametrize("address", ["10.0.0.1", "127.0.0.1", "::1", "fe80::1%2", "fd00::1",
                                         "169.254.169.254", "::ffff:127.0.0.1", "0.0.0.0",
                                         "2606:4700::1111%3"])  # fmt: skip
    async def test_a_name_with_a_private_address_is_refused(self, address):
        with pytest.raises(TargetRefused, match=r"innocent\.example must not be called"):
            await Targets(lookup=answering([address])).resolve("innocent.example", 80)

    async def test_a_name_that_leads_to_metadata_is_refused_whatever_is_allowed(self):
        targets = Targets(True, ["0.0.0.0/0"], lookup=answering(["169.254.169.254"]))
        with pytest.raises(TargetRefused, match="metadata"):
            await targets.resolve("innocent.example", 80)

    async def test_the_addresses_come_in_the_order_of_the_system_each_once(self):
        answer = ["2606:4700::1111", PUBLIC, PUBLIC, "1.1.1.1"]
        assert await Targets(lookup=answering(answer)).resolve("example.com", 8080) == [
            Address("2606:4700::1111", 8080, socket.AF_INET6),
            Address(PUBLIC, 8080, socket.AF_INET),
            Address("1.1.1.1", 8080, socket.AF_INET),
        ]

    async def test_of_several_addresses_the_permitted_ones_are_used(self):
        targets = Targets(lookup=answering(["127.0.0.1", PUBLIC, "::1", "10.0.0.1"]))
        assert await targets.resolve("example.com", 80) == [Address(PUBLIC, 80, socket.AF_INET)]

    async def test_a_public_literal_is_returned_without_a_lookup(self):
        log = []
        targets = Targets(lookup=answering([], log=log))
        assert await targets.resolve("8.8.8.8", 1) == [Address("8.8.8.8", 1, socket.AF_INET)]
        v6 = Address("2606:4700::1111", 2, socket.AF_INET6)
        assert await targets.resolve("2606:4700:0::1111", 2) == [v6]
        assert await targets.resolve("[2606:4700::1111]", 2) == [v6]
        assert log == []

    async def test_a_name_without_an_address_is_an_os_error(self):
        with pytest.raises(OSError, match=r"example\.com has no address"):
            await Targets(lookup=answering([])).resolve("example.com", 80)

    async def test_a_lookup_that_fails_is_an_os_error_and_is_made_again_the_next_time(self):
        log = []
        lookup = answering(socket.gaierror(-2, "Name or service not known"), [PUBLIC], log=log)
        targets = Targets(lookup=lookup)
        with pytest.raises(OSError, match="not known"):
            await targets.resolve("example.com", 80)
        assert await targets.resolve("example.com", 80)
        assert len(log) == 2

    async def test_address_families_other_than_ip_are_ignored(self):
        async def lookup(host, port):
            return [(1, 1, 0, "", "/run/docker.sock"), entry(PUBLIC, port)]

        found = await Targets(lookup=lookup).resolve("example.com", 80)
        assert [one.host for one in found] == [PUBLIC]


@pytest.mark.asyncio
class TestRemembering:
    async def test_a_name_is_looked_up_once_in_some_seconds(self):
        log, clock = [], ManualClock()
        targets = Targets(lookup=answering([PUBLIC], ["1.1.1.1"], log=log), clock=clock)
        for port in (80, 81, 80):
            assert await targets.resolve("example.com", port) == [
                Address(PUBLIC, port, socket.AF_INET)
            ]
        assert await targets.resolve("EXAMPLE.com.", 80)
        assert len(log) == 1
        clock.advance(FRESH_SECONDS)
        assert [one.host for one in await targets.resolve("example.com", 80)] == ["1.1.1.1"]
        assert len(log) == 2

    async def test_concurrent_requests_share_a_lookup(self):
        log = []
        targets = Targets(lookup=answering([PUBLIC], log=log))
        found = await asyncio.gather(*(targets.resolve("example.com", 80) for _ in range(100)))
        assert len(log) == 1
        assert {one.host for each in found for one in each} == {PUBLIC}

    async def test_a_cancelled_request_does_not_cancel_the_lookup_of_others(self):
        answered, log = asyncio.Event(), []

        async def lookup(host, port):
            log.append(host)
            await answered.wait()
            return [entry(PUBLIC, port)]

        targets = Targets(lookup=lookup)
        first = asyncio.create_task(targets.resolve("example.com", 80))
        second = asyncio.create_task(targets.resolve("example.com", 80))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert first.cancelled()
        answered.set()
        assert [one.host for one in await second] == [PUBLIC]
        assert len(log) == 1

    async def test_a_lookup_that_fails_after_all_callers_left_logs_nothing(self, caplog):
        answered = asyncio.Event()

        async def lookup(host, port):
            await answered.wait()
            raise OSError("no")

        targets = Targets(lookup=lookup)
        waiting = asyncio.create_task(targets.resolve("example.com", 80))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        answered.set()
        while targets._pending:
            await asyncio.sleep(0)
        assert not caplog.records

    async def test_a_refusal_is_not_cached(self):
        targets = Targets(lookup=answering(["10.0.0.1"], [PUBLIC]))
        with pytest.raises(TargetRefused):
            await targets.resolve("example.com", 80)
        assert await targets.resolve("example.com", 80)

    async def test_only_permitted_addresses_are_cached(self):
        targets = Targets(lookup=answering(["127.0.0.1", PUBLIC], ["127.0.0.1"]))
        for _ in range(3):
            found = await targets.resolve("example.com", 80)
            assert [one.host for one in found] == [PUBLIC]

    async def test_the_number_of_cached_names_is_limited(self):
        targets = Targets(lookup=answering([PUBLIC]))
        for number in range(MAX_NAMES + 10):
            await targets.resolve(f"host-{number}.example", 80)
        assert len(targets._cache) == MAX_NAMES
        assert "host-0.example" not in targets._cache
        assert not targets._pending


class Renewed:
    """Targets that know example.com from a lookup of some seconds ago; the next one is held."""

    def __init__(self):
        self.clock = ManualClock()
        self.targets = Targets(lookup=self._lookup, clock=self.clock)
        self.answers = asyncio.Queue()
        self.log = []

    async def _lookup(self, host, port):
        self.log.append(host)
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return [entry(answer, port)]

    async def begin(self):
        self.answers.put_nowait(PUBLIC)
        assert await self.found() == PUBLIC
        self.clock.advance(FRESH_SECONDS)
        return self

    async def found(self):
        (address,) = await self.targets.resolve("example.com", 80)
        return address.host

    async def answer(self, answer):
        """Let the lookup that hangs end so."""
        self.answers.put_nowait(answer)
        while self.targets._pending:
            await asyncio.sleep(0)


@pytest.mark.asyncio
class TestLastKnown:
    @pytest.fixture
    def impatient(self, monkeypatch):
        monkeypatch.setattr(target, "HUNG_AFTER_SECONDS", 0.01)

    @pytest.fixture
    def patient(self, monkeypatch):
        monkeypatch.setattr(target, "HUNG_AFTER_SECONDS", 60.0)

    async def test_while_a_renewal_hangs_the_cached_addresses_are_used(self, impatient):
        renewed = await Renewed().begin()
        assert [await renewed.found() for _ in range(3)] == [PUBLIC] * 3
        assert len(renewed.log) == 2
        await renewed.answer("1.1.1.1")
        assert await renewed.found() == "1.1.1.1"
        assert len(renewed.log) == 2

    async def test_a_renewal_that_hangs_is_waited_for_once(self, patient):
        renewed = await Renewed().begin()
        waiting = asyncio.create_task(renewed.found())
        while len(renewed.log) < 2:
            await asyncio.sleep(0)
        renewed.clock.advance(60)
        assert await renewed.found() == PUBLIC
        assert not waiting.done()
        await renewed.answer("1.1.1.1")
        assert await waiting == "1.1.1.1"

    async def test_without_an_answer_by_a_dns_server_the_cached_addresses_are_used(self, patient):
        renewed = await Renewed().begin()
        for _ in range(3):
            renewed.answers.put_nowait(UNANSWERED)
            assert await renewed.found() == PUBLIC
        assert len(renewed.log) == 4

    @pytest.mark.parametrize(("answer", "error"), [(UNKNOWN, OSError), ("10.0.0.1", TargetRefused)])
    async def test_a_name_that_is_gone_or_has_a_private_address_leaves_the_cache(
        self, patient, answer, error
    ):
        renewed = await Renewed().begin()
        for each in (answer, UNANSWERED):
            renewed.answers.put_nowait(each)
            with pytest.raises(error if each is answer else OSError):
                await renewed.found()
        assert not renewed.targets._cache

    @pytest.mark.parametrize("answer", [UNKNOWN, "10.0.0.1"])
    async def test_a_late_answer_that_a_name_is_gone_empties_the_cache_too(self, impatient, answer):
        renewed = await Renewed().begin()
        assert await renewed.found() == PUBLIC
        await renewed.answer(answer)
        renewed.answers.put_nowait(UNANSWERED)
        with pytest.raises(OSError, match="Temporary failure"):
            await renewed.found()

    async def test_cached_addresses_are_used_for_a_limited_time(self, patient):
        renewed = await Renewed().begin()
        renewed.clock.advance(STALE_SECONDS - 1)
        renewed.answers.put_nowait(UNANSWERED)
        assert await renewed.found() == PUBLIC
        renewed.clock.advance(1)
        renewed.answers.put_nowait(UNANSWERED)
        with pytest.raises(OSError, match="Temporary failure"):
            await renewed.found()

    async def test_a_cancelled_request_does_not_cancel_the_renewal(self, patient):
        renewed = await Renewed().begin()
        waiting = [asyncio.create_task(renewed.found()) for _ in range(2)]
        while len(renewed.log) < 2:
            await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        await renewed.answer("1.1.1.1")
        assert await waiting[1] == "1.1.1.1"


@pytest.mark.asyncio
class TestConnecting:
    """127.0.0.2 stands for the public address: it alone is allowed. 127.0.0.1 is the one within."""

    async def test_a_name_that_changes_after_the_check_is_connected_to_where_it_was_checked(self):
        log = []
        with Receiver("127.0.0.2") as outside, Receiver("127.0.0.1", outside.port) as within:
            lookup = answering(["127.0.0.2"], ["127.0.0.1"], log=log)
            targets = Targets(allow=["127.0.0.2"], lookup=lookup)
            url = f"http://rebinding.example:{outside.port}/ok"
            targets.check_endpoint(url)
            pool = Pool(resolve=targets.resolve)
            try:
                response = await pool.request("POST", url, body=b"{}")
            finally:
                await pool.close()
            assert response.status == 200
            assert log == ["rebinding.example"]
            assert len(outside.requests) == 1
            assert outside.requests[0].header("host") == f"rebinding.example:{outside.port}"
            assert within.connections == 0

    async def test_a_name_that_moves_to_a_private_address_is_refused_without_a_connection(self):
        clock = ManualClock()
        with Receiver("127.0.0.2") as outside, Receiver("127.0.0.1", outside.port) as within:
            lookup = answering(["127.0.0.2"], ["127.0.0.1"])
            targets = Targets(allow=["127.0.0.2"], lookup=lookup, clock=clock)
            url = f"http://rebinding.example:{outside.port}/ok"
            for expected in (200, TargetRefused):
                pool = Pool(resolve=targets.resolve)  # without connections from before
                try:
                    if expected == 200:
                        assert (await pool.request("POST", url)).status == 200
                    else:
                        with pytest.raises(TargetRefused):
                            await pool.request("POST", url)
                finally:
                    await pool.close()
                clock.advance(FRESH_SECONDS)
            assert outside.connections == 1
            assert within.connections == 0

    @pytest.mark.parametrize("host", ["127.0.0.1", "2130706433", "0x7f.1", "127.1", "0177.0.0.1",
                                      "localhost", "[::ffff:127.0.0.1]"])  # fmt: skip
    async def test_a_literal_that_skipped_the_first_check_connects_nowhere(self, host):
        with Receiver("127.0.0.1") as within:
            pool = Pool(resolve=Targets().resolve)
            try:
                with pytest.raises(TargetRefused):
                    await pool.request("POST", f"http://{host}:{within.port}/ok")
            finally:
                await pool.close()
            assert within.connections == 0

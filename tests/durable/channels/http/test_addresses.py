"""This host's own addresses are private ones, and this server's own port is called on none of them.

Addresses are given to this host in a network namespace of a test's own, so that they can be public.
"""

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tickwheel.durable.channels.http import lookups
from tickwheel.durable.channels.http.target import Targets
from tickwheel.errors import TargetRefused
from tickwheel.http import NoRoom, Pool

pytestmark = pytest.mark.usefixtures("watched")

PORT = 7380
OWN = ["20.30.40.50", "20.30.41.1", "20.30.41.2", "2606:4700::77"]  # two of them on one network
OTHERS = ["20.30.40.51", "20.30.41.3", "2606:4700::78"]
SET_UP = """
set -e
ip link set lo up
ip link add one type veth peer name two
ip link set one up
ip address add 20.30.40.50/32 dev lo
ip address add 20.30.41.1/24 dev one
ip address add 20.30.41.2/24 dev one
ip address add 2606:4700::77/128 dev lo nodad
"""
ANY_CAN_BE_BOUND = (
    "echo 1 | tee /proc/sys/net/ipv4/ip_nonlocal_bind /proc/sys/net/ipv6/ip_nonlocal_bind"
)
LOOPBACK = ["127.0.0.1", "127.1", "127.9.9.9", "localhost", "api.localhost", "[::1]", "0.0.0.0",
            "[::]", "[::ffff:127.0.0.1]", "[64:ff9b::127.0.0.1]"]  # fmt: skip


def in_a_namespace(code, more="true"):
    """Run Python where this host has the addresses OWN; return what it prints, as JSON."""
    space = ["unshare", "--net", "--map-root-user"]
    made = subprocess.run([*space, "sh", "-c", SET_UP], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no network namespace can be made here: {made.stderr.decode()}")
    script = f'{SET_UP}\n{more} > /dev/null\nexec "$@"'
    code = f"import json\nfrom ipaddress import ip_address\n{code}"
    command = [*space, "sh", "-c", script, "sh", sys.executable, "-c", code]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3]
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def looked_up(*addresses):
    """A lookup that gives these addresses for any name."""

    async def lookup(host, port):
        return [(10 if ":" in one else 2, 1, 6, "", (one, port)) for one in addresses]

    return lookup


class TestThisHostsAddresses:
    @pytest.mark.parametrize("more", ["true", ANY_CAN_BE_BOUND], ids=["usual", "nonlocal"])
    def test_own_addresses_are_recognised(self, more):
        asked = [*OWN, *OTHERS, "127.0.0.1", "127.9.9.9", "0.0.0.0", "::", "::1"]
        code = f"""
from tickwheel.durable.channels.http.lookups import is_own
print(json.dumps([one for one in {asked} if is_own(ip_address(one))]))
"""
        known = in_a_namespace(code, more)
        if more == ANY_CAN_BE_BOUND:  # there, a second address of one network is not known
            known = [*known, "20.30.41.2"]
        assert set(known) == set(asked) - set(OTHERS)

    def test_they_are_refused_like_private_ones(self):
        code = f"""
import asyncio
from tickwheel.durable.channels.http.target import Targets
from tickwheel.errors import TargetRefused

async def why(address, **options):
    async def lookup(host, port):
        return [(10 if ":" in address else 2, 1, 6, "", (address, port))]
    targets = Targets(lookup=lookup, **options)
    host = f"[{{address}}]" if ":" in address else address
    said = []
    for check in (
        lambda: asyncio.to_thread(targets.check_endpoint, f"https://{{host}}:8443/hook"),
        lambda: targets.resolve(host, 8443), lambda: targets.resolve("name.example", 8443),
    ):
        try:
            await check()
            said.append(None)
        except TargetRefused as error:
            said.append(str(error))
    return said

async def main():
    refused = [await why(one) for one in {OWN}]
    others = [await why(one) for one in {OTHERS}]
    private = [await why(one, allow_private=True) for one in {OWN}]
    networks = [await why(one, allow=["20.30.0.0/16", "2606:4700::/32"]) for one in {OWN}]
    print(json.dumps([refused, others, private, networks]))

asyncio.run(main())
"""
        refused, *permitted = in_a_namespace(code)
        assert all("this host's own (see --allow-private" in why for one in refused for why in one)
        assert len(refused) == len(OWN)
        assert [why for some in permitted for one in some for why in one if why] == []


class TestThisServersPort:
    @pytest.mark.asyncio
    @pytest.mark.parametrize("host", LOOPBACK)
    async def test_the_own_port_is_always_refused_and_other_ports_are_not(self, host):
        targets = Targets(
            allow_private=True, allow=["127.0.0.0/8"], own_port=PORT,
            lookup=looked_up("127.0.0.1", "::1"),
        )  # fmt: skip
        with pytest.raises(TargetRefused, match="this server itself"):
            targets.check_endpoint(f"http://{host}:{PORT}/v1/tasks")
        with pytest.raises(TargetRefused, match="this server itself"):
            await targets.resolve(host, PORT)
        targets.check_endpoint(f"http://{host}:{PORT + 1}/hook")
        assert await targets.resolve(host, PORT + 1)

    @pytest.mark.parametrize(("scheme", "port", "other"), [("http", 80, 443), ("HTTPS", 443, 80)])
    def test_the_own_port_may_be_the_default_of_the_scheme(self, scheme, port, other):
        with pytest.raises(TargetRefused, match="this server itself"):
            Targets(allow_private=True, own_port=port).check_endpoint(f"{scheme}://127.0.0.1/")
        Targets(allow_private=True, own_port=other).check_endpoint(f"{scheme}://127.0.0.1/")

    @pytest.mark.asyncio
    async def test_a_name_with_another_address_uses_that(self):
        lookup = looked_up("127.0.0.1", "10.1.2.3")
        targets = Targets(allow_private=True, own_port=PORT, lookup=lookup)
        assert [one.host for one in await targets.resolve("both.example", PORT)] == ["10.1.2.3"]
        both = [one.host for one in await targets.resolve("both.example", PORT + 1)]
        assert both == ["127.0.0.1", "10.1.2.3"]

    @pytest.mark.asyncio
    async def test_another_host_may_be_called_on_the_same_port(self):
        targets = Targets(own_port=PORT, lookup=looked_up("93.184.215.14"))
        targets.check_endpoint(f"https://93.184.215.14:{PORT}/")
        assert await targets.resolve("93.184.215.14", PORT)
        assert await targets.resolve("other.example", PORT)


class TestWithoutDescriptors:
    @pytest.fixture(autouse=True)
    def no_sockets(self, monkeypatch):
        def fail(address):
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(lookups, "datagram_socket", fail)

    def test_without_a_descriptor_an_endpoint_is_checked_by_the_call(self):
        Targets().check_endpoint("https://93.184.215.14/")

    @pytest.mark.asyncio
    async def test_without_a_descriptor_a_call_is_delayed_and_is_not_a_failure(self):
        unreachable = "240.0.0.1"
        targets = Targets(allow_private=True, own_port=PORT, lookup=looked_up(unreachable))
        pool = Pool(resolve=targets.resolve)
        for host in (unreachable, "name.example"):
            with pytest.raises(NoRoom, match=f"connect to {host}:{PORT}: Too many open files"):
                await pool.request("POST", f"http://{host}:{PORT}/")
        await pool.close()

"""IP addresses: which are public, and which embed another address. Pure."""

from __future__ import annotations

from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)

IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network

# Not `ipaddress.is_private`, whose definition differs between Python versions.
SPECIAL: tuple[tuple[IPNetwork, str], ...] = tuple(
    (ip_network(network), what)
    for network, what in (
        ("0.0.0.0/8", "unspecified"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared by a carrier's customers"),
        ("127.0.0.0/8", "loopback"),
        ("169.254.0.0/16", "link-local"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "reserved"),
        ("192.0.2.0/24", "for documentation"),
        ("192.88.99.0/24", "a 6to4 relay"),
        ("192.168.0.0/16", "private"),
        ("198.18.0.0/15", "for benchmarks"),
        ("198.51.100.0/24", "for documentation"),
        ("203.0.113.0/24", "for documentation"),
        ("224.0.0.0/4", "multicast"),
        ("255.255.255.255/32", "broadcast"),
        ("240.0.0.0/4", "reserved"),
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("::/96", "an IPv4 address in disguise"),
        ("::ffff:0:0/96", "an IPv4 address in disguise"),
        ("::ffff:0:0:0/96", "an IPv4 address in disguise"),
        ("64:ff9b::/96", "an IPv4 address behind NAT64"),
        ("64:ff9b:1::/48", "an IPv4 address behind NAT64"),
        ("2001::/32", "an IPv4 address behind Teredo"),
        ("2001:2::/48", "for benchmarks"),
        ("2001::/23", "reserved"),
        ("2001:db8::/32", "for documentation"),
        ("2002::/16", "an IPv4 address behind 6to4"),
        ("3fff::/20", "for documentation"),
        ("fc00::/7", "private"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "site-local"),
        ("ff00::/8", "multicast"),
    )
)
GLOBAL_UNICAST = ip_network("2000::/3")  # the rest of IPv6 is not assigned

# Metadata services of clouds, which give credentials to every process on a machine.
METADATA = frozenset(
    map(
        ip_address,
        (
            "169.254.169.254",
            "169.254.170.2",
            "169.254.170.23",
            "169.254.0.23",
            "169.254.42.42",
            "100.100.100.200",
            "168.63.129.16",
            "192.0.0.192",
            "fd00:ec2::254",
            "fd00:ec2::23",
            "fd20:ce::254",
            "fd00:c1::a9fe:a9fe",
            "fd00:42::42",
            "fe80::a9fe:a9fe",
        ),
    )
)
METADATA_NAMES = frozenset(
    {
        "instance-data.ec2.internal",
        "metadata.goog",
        "metadata.google.internal",
        "metadata.tencentyun.com",
    }
)


def special_kind(address: IPAddress, embedded: tuple[IPv4Address, ...]) -> str | None:
    """Return the kind of an address that is not public; None for a public one.

    `embedded` has the IPv4 addresses inside it, as `embedded_in` returns them.
    """
    for network, what in SPECIAL:
        if address in network:
            return what
    if embedded:
        return "an IPv4 address behind ISATAP"
    return None if address.version == 4 or address in GLOBAL_UNICAST else "reserved"


def embedded_in(address: IPAddress) -> tuple[IPv4Address, ...]:
    """Return the IPv4 addresses that an IPv6 address may lead to, by any known mapping."""
    if isinstance(address, IPv4Address):
        return ()
    number = int(address)
    low = IPv4Address(number & 0xFFFFFFFF)
    if number >> 32 in (0, 0xFFFF, 0xFFFF0000, 0x64FF9B << 64):
        return () if number <= 1 else (low,)  # :: and ::1 embed nothing
    if number >> 80 == 0x64FF9B0001:
        return nat64(number)
    if number >> 112 == 0x2002:
        return (IPv4Address(number >> 80 & 0xFFFFFFFF),)
    if number >> 96 == 0x20010000:  # Teredo: the server's, and the client's with inverted bits
        return IPv4Address(number >> 64 & 0xFFFFFFFF), IPv4Address(~number & 0xFFFFFFFF)
    if number >> 32 & 0xFDFFFFFF == 0x5EFE:
        return (low,)
    return ()


def nat64(number: int) -> tuple[IPv4Address, ...]:
    """Return the addresses that one under the local NAT64 prefix may lead to.

    The prefix may have 48, 56, 64 or 96 bits, and bits 64 to 71 are skipped (RFC 6052). The address
    does not show which, so all of them count, except those that start with a zero byte.
    """
    upper, lower = number >> 64, number & (1 << 56) - 1
    found = {
        (upper & 0xFFFF) << 16 | lower >> 40,
        (upper & 0xFF) << 24 | lower >> 32,
        lower >> 24,
        number & 0xFFFFFFFF,
    }
    return tuple(IPv4Address(one) for one in sorted(found) if one >> 24) or (IPv4Address(0),)

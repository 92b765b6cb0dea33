"""The URL of a ZooKeeper ensemble: servers, path, credentials and TLS. Pure."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import parse_qsl, unquote

SCHEME = "zookeeper://"
TLS_OPTIONS = {"ca": "ca", "cert": "certfile", "key": "keyfile"}


class ZooKeeperUrl(NamedTuple):
    """A parsed URL: zookeeper://user:password@host1:2181,host2:2181/path?tls=true&ca=FILE."""

    hosts: str
    root: str
    credentials: str  # "user:password", or ""
    tls: bool
    files: dict[str, str]  # kazoo's names of the TLS files

    @classmethod
    def parse(cls, url: str) -> ZooKeeperUrl:
        """Return the parts of a URL; raise ValueError with the reason for a wrong one."""
        address, _, query = url.removeprefix(SCHEME).partition("?")
        address, _, path = address.partition("/")
        credentials, _, hosts = address.rpartition("@")
        if not url.startswith(SCHEME) or not all(hosts.split(",")):
            raise ValueError(  # without the URL, which may have a password
                "a ZooKeeper URL must look like zookeeper://host1:2181,host2:2181/path"
            )
        if credentials and ":" not in credentials:
            raise ValueError("the credentials of a ZooKeeper URL must be user:password")
        options = dict(parse_qsl(query, keep_blank_values=True))
        tls = options.pop("tls", "false")
        if options.keys() - TLS_OPTIONS.keys() or tls not in ("true", "false"):
            raise ValueError(
                f"a ZooKeeper URL may have tls=true, ca=, cert= and key=, got {query!r:.200}"
            )
        return cls(
            hosts, "/" + path.strip("/") if path.strip("/") else "/tickwheel",
            unquote(credentials), tls == "true",
            {TLS_OPTIONS[name]: value for name, value in options.items()},
        )  # fmt: skip

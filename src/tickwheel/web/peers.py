"""The other servers of the cluster: asks each for its figures, with the caller's own token.

A token goes only to an address that a registered node has given, never to one from a request. A
server that is reached by HTTPS sends tokens over HTTPS only, and only a server that listens on
loopback sends them to a loopback address.
"""

from __future__ import annotations

import asyncio
import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from tickwheel.errors import TickwheelError
from tickwheel.http.pool import Pool
from tickwheel.web.figures import merge
from tickwheel.web.schemas import NodeFigures

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tickwheel.durable.coordinator import NodeRow
    from tickwheel.web.figures import Figures
    from tickwheel.web.route import Call

TIMEOUT_SECONDS = 2.0  # for all servers together, which are asked at the same time
MAX_SERVERS = 100  # asked for one answer; the nodes of the others are listed without figures
MAX_ANSWER_BYTES = 2 << 20
CONNECTIONS = 2  # to one server
FORWARDED = (b"authorization", b"tickwheel-namespace")


class Peers:
    """Asks the other servers of the cluster; it never raises for one that does not answer.

    - `local`: this server listens on loopback. `https`: it is reached by HTTPS.
    """

    def __init__(self, *, local: bool, https: bool) -> None:
        self._local = local
        self._https = https
        self._pool: Pool | None = None

    async def collect(
        self, call: Call, own: Figures, path: str, rows: Iterable[NodeRow]
    ) -> Figures:
        """Return the figures of all nodes, merged with this server's own."""
        covered = {row.name for row in own.by_node}
        servers: dict[str, list[str]] = {}
        errors: dict[str, str] = {}
        for row in rows:
            if row.name in covered:
                continue
            error = self._refusal(row)
            if error is None and row.address not in servers and len(servers) >= MAX_SERVERS:
                error = f"not asked: one answer covers {MAX_SERVERS} other servers"
            if error is None:
                assert row.address is not None
                servers.setdefault(row.address, []).append(row.name)
            else:
                errors[row.name] = error
        answers = await asyncio.gather(
            *(self._ask(call, address, path, type(own)) for address in servers)
        )
        parts = [own]
        for names, answer in zip(servers.values(), answers, strict=True):
            if isinstance(answer, str):
                errors |= dict.fromkeys(names, answer)
                continue
            found = {row.name for row in answer.by_node}
            if covered.isdisjoint(found) and not found.isdisjoint(names):
                parts.append(answer)
                covered |= found
                errors |= dict.fromkeys(set(names) - found, "its server does not list it")
            else:
                errors |= dict.fromkeys(names, "another node answers at its address")
        merged = merge(parts)
        merged.by_node += [NodeFigures(name, error) for name, error in errors.items()]
        merged.by_node.sort(key=lambda row: row.name)
        return merged

    def _refusal(self, row: NodeRow) -> str | None:
        """Return why a node must not be asked; None: it may be asked."""
        if row.state == "unregistered":
            return "it is not registered"
        if row.address is None:
            return "it has no address: start it with --advertise"
        parts = urlsplit(row.address)
        if self._https and parts.scheme != "https":
            return "its address is not https, as this server's"
        if not self._local and is_loopback(parts.hostname or ""):
            return "its address is on loopback: start it with --advertise"
        return None

    async def _ask(self, call: Call, address: str, path: str, kind: type[Figures]) -> Figures | str:
        """Return the figures of one server, or why there are none."""
        if self._pool is None:
            self._pool = Pool(
                connections=CONNECTIONS, connect_timeout=TIMEOUT_SECONDS, max_body=MAX_ANSWER_BYTES
            )
        url = f"{address}{path}?scope=server"
        headers = forwarded_headers(call.headers, call.request_id)
        try:
            response = await self._pool.request(
                "GET", url, headers=headers, timeout=TIMEOUT_SECONDS
            )
            if response.status != 200:
                return f"it answered with status {response.status}"
            if not response.whole:
                return f"its answer has more than {MAX_ANSWER_BYTES} bytes"
            answer = msgspec.json.decode(response.body, type=kind)
            return merge([answer])  # raises for histograms of another version
        except (TickwheelError, ValueError, OSError, msgspec.DecodeError) as error:
            return f"it did not answer: {error}"

    async def close(self) -> None:
        """Close the connections."""
        if self._pool is not None:
            await self._pool.close()


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def forwarded_headers(headers: Mapping[bytes, bytes], request_id: str) -> list[tuple[str, str]]:
    """Return the headers of a request to another server: the caller's token and namespace."""
    given = [(name, headers[name]) for name in FORWARDED if name in headers]
    passed = [(name.decode(), value.decode("latin-1")) for name, value in given]
    return [*passed, ("x-request-id", request_id)]

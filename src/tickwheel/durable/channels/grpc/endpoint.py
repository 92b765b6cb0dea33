"""Endpoints of services over gRPC, and the files for TLS. This needs no grpcio."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tickwheel.durable.channels.http.target import authority_of
from tickwheel.errors import TargetRefused

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

SCHEMES = {"grpc": None, "grpcs": None}  # neither has a usual port


class TlsFiles(NamedTuple):
    """Files in PEM form for calls with TLS; each may be None.

    - `ca`: the certificate authorities to trust, instead of those that come with grpcio.
    - `cert` and `key`: the certificate that this process shows to its callees.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


def tls_files(paths: Sequence[str | PathLike[str] | None] | None) -> TlsFiles:
    """Return the files that a user names: authorities, certificate, key; each may be None."""
    return TlsFiles(*(None if path is None else Path(path) for path in paths or ()))


class Origin(NamedTuple):
    """The scheme, host and port of an endpoint: what a connection is for."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def origin_of(endpoint: str) -> Origin:
    """Return the origin of an endpoint; TargetRefused if anything follows its port."""
    host, port = authority_of(endpoint, SCHEMES)
    scheme, _, rest = endpoint.partition("://")
    origin = Origin(scheme.lower(), host, port)
    if re.search(r"[/?]", rest):
        raise TargetRefused(f"{origin}: an endpoint of gRPC has nothing after its port")
    return origin

"""Sessions of browsers: a token in a cookie that no script can read, and a CSRF token.

A server keeps nothing: the cookie has the token itself, so each request is checked as one with an
`authorization` header, a restart ends no session, and a revoked token ends every session. The
cookie has no path of its own. The browser sends it to the API only, under whatever prefix a proxy
or a mount has added.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from tickwheel.durable.directory.tokens import SCOPES, TOKEN
from tickwheel.web import schemas
from tickwheel.web.problems import HttpError
from tickwheel.web.route import Call, Reply, Route, client_of

if TYPE_CHECKING:
    from collections.abc import Mapping

CSRF_HEADER = b"tickwheel-csrf"
SAFE_METHODS = ("GET", "HEAD")
SAME_SITE = (b"same-origin", b"none")  # of sec-fetch-site: this page, or the user's own navigation
NO_STORE = (b"cache-control", b"no-store")


def cookie_name(headers: Mapping[bytes, bytes]) -> str:
    """Return the name of the cookie; ports share cookies, so that each has its own name."""
    port = headers.get(b"host", b"").rpartition(b":")[2]
    return f"tickwheel-{int(port)}" if port.isdigit() else "tickwheel"


def session_token(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the token in the request's cookie, or None."""
    wanted = cookie_name(headers).encode()
    for part in headers.get(b"cookie", b"").split(b";"):
        name, _, value = part.strip().partition(b"=")
        if name == wanted and TOKEN.fullmatch(value.decode("latin-1")):
            return value
    return None


def csrf_token(token: bytes) -> str:
    """Return the CSRF token of a session; it says nothing about the token."""
    return hmac.new(token, b"tickwheel csrf", hashlib.sha256).hexdigest()[:32]


def check_session(token: bytes, method: str, headers: Mapping[bytes, bytes]) -> None:
    """Raise if a request with a session's cookie may come from another site's page."""
    check_origin(headers)
    if headers.get(b"sec-fetch-site", b"none") not in SAME_SITE:
        raise HttpError("forbidden", "a session's request from another site is forbidden")
    if method not in SAFE_METHODS:
        given = headers.get(CSRF_HEADER, b"")
        if not hmac.compare_digest(given, csrf_token(token).encode()):
            raise HttpError("forbidden", "a session's change needs the header tickwheel-csrf")


def check_origin(headers: Mapping[bytes, bytes]) -> None:
    """Raise if another site's page sent the request."""
    origin = headers.get(b"origin")
    if origin is not None and origin.partition(b"://")[2] != headers.get(b"host"):
        raise HttpError("forbidden", "a session's request from another origin is forbidden")


async def get_session(call: Call) -> Reply:
    """Return who the caller is and what the caller may do; 401 if a token is needed."""
    used = b"authorization" in call.headers  # a cookie that is not needed may have been ignored
    token = session_token(call.headers) if used else None
    return Reply(session_view(call, token), headers=[NO_STORE])


async def put_session(call: Call, body: schemas.SignIn) -> Reply:
    """Sign a browser in: the answer sets a cookie with the token."""
    check_origin(call.headers)
    token = body.token.strip().encode("utf-8", "replace")
    call.headers = {**call.headers, b"authorization": b"Bearer " + token}
    call.access = await call.app.verify(client_of(call.scope), call.headers, call.request_id)
    headers = [NO_STORE, cookie_header(call, token.decode())]
    return Reply(session_view(call, token), headers=headers)


async def delete_session(call: Call) -> Reply:
    """Sign a browser out: the answer removes the cookie."""
    return Reply(None, 204, [cookie_header(call, "", "; Max-Age=0")])


def cookie_header(call: Call, value: str, more: str = "") -> tuple[bytes, bytes]:
    """Return the header that sets the cookie; over TLS it is for TLS only.

    Behind a proxy that terminates TLS, only the browser's `origin` has the scheme that it uses.
    """
    cookie = f"{cookie_name(call.headers)}={value}; HttpOnly; SameSite=Strict{more}"
    origin = call.headers.get(b"origin", b"")
    if call.scope.get("scheme") == "https" or origin.startswith(b"https://"):
        cookie += "; Secure"
    return b"set-cookie", cookie.encode()


def session_view(call: Call, token: bytes | None) -> schemas.Session:
    """Return a session as its browser sees it."""
    access = call.access
    return schemas.Session(
        actor=access.actor,
        namespace=access.namespace or "default",
        confined=access.confined,
        scopes=[scope for scope in SCOPES if access.may(scope)],
        csrf=None if token is None else csrf_token(token),
        node=call.app.node.name,
        version=call.app.version,
    )


ROUTES = [
    Route("GET", "/v1/session", get_session, scope="", gives={200: schemas.Session}),
    Route("POST", "/v1/session", put_session, scope=None, takes=schemas.SignIn,
          gives={200: schemas.Session}, problems=(401, 403, 429), answers=("set-cookie",)),
    Route("DELETE", "/v1/session", delete_session, scope=None, gives={204: None},
          answers=("set-cookie",)),
]  # fmt: skip

"""Tokens over HTTP: an admin lists, creates and revokes them, in one namespace or in all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tickwheel.durable.directory.tokens import ANY, DEFAULT, namespace_named
from tickwheel.web import schemas, views
from tickwheel.web.problems import HttpError
from tickwheel.web.route import Call, Reply, Route

if TYPE_CHECKING:
    from tickwheel.durable.registry import Token


def token_view(token: Token) -> schemas.Token:
    """Return the view of a token, without its digest."""
    return schemas.Token(
        token.id, token.name, token.namespace or DEFAULT, [*token.scopes], token.rate,
        views.format_time(token.created_at_ms), views.optional_time(token.expires_at_ms),
    )  # fmt: skip


async def list_tokens(call: Call) -> Reply:
    """Return the tokens that the caller may revoke."""
    tokens = await call.scheduler.tokens(namespace=call.access.within)
    return Reply(schemas.TokenPage([token_view(token) for token in tokens]))


async def create_token(call: Call, body: schemas.CreateToken) -> Reply:
    """Create a token; only this answer has its text."""
    access = call.access
    wanted = body.namespace
    namespace = access.namespace if wanted is None else namespace_named(wanted)
    if access.confined and namespace != access.namespace:
        raise HttpError("forbidden", "the token is for another namespace")
    if not call.app.guard.had_tokens and (namespace != ANY or "admin" not in body.scopes):
        raise HttpError(
            "invalid", "the first token must have the scope admin and the namespace *:"
            " from then on every request needs a token",
        )  # fmt: skip
    token, text = await call.scheduler.create_token(
        body.name, namespace=namespace, scopes=body.scopes, rate=body.rate,
        lifetime=body.lifetime, **call.audit_fields,
    )  # fmt: skip
    view = msgspec.structs.replace(token_view(token), token=text)
    return Reply(view, 201, [(b"cache-control", b"no-store")])


async def revoke_token(call: Call) -> Reply:
    """Revoke a token; every session and request with it ends."""
    within, fields = call.access.within, call.audit_fields
    if not await call.scheduler.revoke_token(call.params["token"], namespace=within, **fields):
        raise HttpError("not_found", f"no token has the id {call.params['token']!r:.50}")
    return Reply(None, 204)


ROUTES = [
    Route("GET", "/v1/tokens", list_tokens, scope="admin", gives={200: schemas.TokenPage}),
    Route("POST", "/v1/tokens", create_token, scope="admin", takes=schemas.CreateToken,
          gives={201: schemas.Token}),
    Route("DELETE", "/v1/tokens/{token}", revoke_token, scope="admin", gives={204: None},
          problems=(404,)),
]  # fmt: skip

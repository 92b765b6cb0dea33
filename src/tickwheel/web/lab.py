"""The lab over HTTP: a page, and the state of a scene at a time.

`LabApp` serves the lab alone, for `tickwheel lab --web`. A scene has a bounded number of turns, and
is played and encoded on a thread, one at a time: however many ask, the event loop stays free. Its
paths are below `/v1`, where browsers send the cookie of a session.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

import tickwheel
from tickwheel.scenes import show
from tickwheel.scenes.presets import PRESETS
from tickwheel.web import pages
from tickwheel.web.problems import HttpError, problem_of
from tickwheel.web.route import Call, Reply, Route, Router, local_path, parse_query

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    Message = MutableMapping[str, Any]

DOCUMENT = "lab.html"
NO_STORE = [(b"cache-control", b"no-store")]
MAX_WAITING = 20  # requests for a scene at once, of one process


class SceneQuery(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The options of a scene, as text; `tickwheel.scenes` checks them."""

    kind: str = ""
    do: str = ""
    at: str = ""
    tick: str = ""
    size: str = ""
    sizes: str = ""
    pointers: str = ""
    overflow: str = ""
    timeout: str = ""


class PresetPage(msgspec.Struct):
    """The worked examples."""

    items: list[dict[str, Any]]


class Player:
    """Plays scenes on a thread, one at a time; few readers may wait."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "tickwheel-lab")
        self._waiting = 0

    async def play(self, options: dict[str, str]) -> bytes:
        """Return the state of a scene as JSON; raise if too many wait."""
        if self._waiting >= MAX_WAITING:
            raise HttpError("overloaded", f"{MAX_WAITING} scenes are being played: try again soon")
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, encode_scene, options)
        finally:
            self._waiting -= 1


def encode_scene(options: dict[str, str]) -> bytes:
    """Play a scene and return its state as JSON."""
    return msgspec.json.encode(show(options))


player = Player()


async def page(call: Call) -> Reply:
    """Return the page of the lab; its script reads the scene from the address."""
    return pages.document(call, DOCUMENT)


async def scene(call: Call) -> Reply:
    """Return the state of a scene."""
    options = {name: value for name, value in msgspec.structs.asdict(call.query).items() if value}
    try:
        state = await player.play(options)
    except ValueError as error:
        raise HttpError("invalid", str(error)) from None
    return Reply(state, headers=NO_STORE)


async def presets(call: Call) -> Reply:
    """Return the worked examples."""
    return Reply(PresetPage([preset._asdict() for preset in PRESETS]), headers=NO_STORE)


ROUTES = [
    Route("GET", "/lab", page, scope=None, gives={200: msgspec.Raw}),
    Route("GET", "/v1/lab/scene", scene, scope="read", query=SceneQuery, gives={200: dict}),
    Route("GET", "/v1/lab/presets", presets, scope="read", gives={200: PresetPage}),
]


class LabApp:
    """An ASGI application with the lab and nothing else: no scheduler, no tokens, no data."""

    def __init__(self) -> None:
        self.version = tickwheel.__version__
        home = Route("GET", "/", page, scope=None, gives={200: msgspec.Raw})
        static = next(route for route in pages.ROUTES if route.path == "/static/{file}")
        self._router = Router([*ROUTES, home, static])

    async def __call__(
        self, scope: Message, receive: Any, send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Answer one request."""
        try:
            reply = await self._reply(scope)
        except HttpError as error:
            problem, headers = problem_of(error)
            reply = Reply(problem, problem.status, headers, b"application/problem+json")
        value = reply.value
        body = value if isinstance(value, bytes) else msgspec.json.encode(value)
        headers = [
            (b"content-type", reply.media),
            (b"content-length", str(len(body)).encode()),
            *reply.headers,
        ]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _reply(self, scope: Message) -> Reply:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        route, params = self._router.find(method, local_path(scope))
        query = None
        if route.query is not None:
            query = route.read_query(parse_query(scope["query_string"]))
        headers = dict(scope["headers"])
        call = Call(self, None, params, query, headers, "", scope)  # type: ignore[arg-type]
        return await route.handler(call)

"""The WebSocket server of the page about idle connections closes a connection that is silent."""

import asyncio

from test_readme import BLOCK, ROOT

PAGE = ROOT / "docs" / "how-to" / "track-idle-connections.md"


async def connected(app, scope):
    """Run an ASGI application; return the queues of what it receives and sends."""
    receive, send = asyncio.Queue(), asyncio.Queue()
    job = asyncio.create_task(app(scope, receive.get, send.put))
    return job, receive, send


async def closed_in_silence(app):
    """Talk to the server once, then be silent; return what it has sent."""
    life, orders, told = await connected(app, {"type": "lifespan", "asgi": {"version": "3.0"}})
    await orders.put({"type": "lifespan.startup"})
    assert (await told.get())["type"] == "lifespan.startup.complete"
    scope = {"type": "websocket", "path": "/chat", "headers": [], "app": app}
    chat, messages, sent = await connected(app, scope)
    await messages.put({"type": "websocket.connect"})
    await messages.put({"type": "websocket.receive", "text": "hello"})
    found = [await sent.get() for _ in range(3)]
    await messages.put({"type": "websocket.disconnect", "code": 1001})
    await chat
    await orders.put({"type": "lifespan.shutdown"})
    await life
    return found


def test_its_web_socket_is_closed_after_a_silence(capsys):
    code = "\n".join(BLOCK.findall(PAGE.read_text("utf-8")))
    names = {"__name__": "__page__"}
    exec(compile(code.replace("SILENCE = 30.0", "SILENCE = 0.05"), str(PAGE), "exec"), names)
    found = asyncio.run(asyncio.wait_for(closed_in_silence(names["app"]), 30))
    assert [one["type"] for one in found] == [
        "websocket.accept", "websocket.send", "websocket.close",
    ]  # fmt: skip
    assert (found[1]["text"], found[2]["code"]) == ("HELLO", 1001)

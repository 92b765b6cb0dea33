"""The receiver inside Starlette, FastAPI and Flask applications."""

import asyncio
import contextlib
import re
import threading
from pathlib import Path

import flask
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Route

from tickwheel.receiver import Accepted, Receiver, Retry, core


class Application:
    """An ASGI or WSGI application, called the way that its server would."""

    def __init__(self, app):
        self._app = app

    def post(self, headers, body, method="POST"):
        return asyncio.run(self._asgi(headers, body, method))

    async def _asgi(self, headers, body, method):
        pieces = [body[:10], body[10:]]
        incoming = [
            {"type": "http.request", "body": pieces[0], "more_body": True},
            {"type": "http.request", "body": pieces[1], "more_body": False},
        ]
        sent = []
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": "/hook", "raw_path": b"/hook", "query_string": b"",
            "root_path": "", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }  # fmt: skip

        async def receive():
            return incoming.pop(0) if incoming else {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        await self._app(scope, receive, send)
        got = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], got, b"".join(part.get("body", b"") for part in sent[1:])


class FlaskApplication(Application):
    def post(self, headers, body, method="POST"):
        with self._app.test_client() as client:
            answer = client.open("/hook", method=method, headers=headers, data=body)
            got = {name.lower(): value for name, value in answer.headers.items()}
            return answer.status_code, got, answer.data


def starlette_app(receiver, handler):
    return Application(
        Starlette(routes=[Route("/hook", receiver.starlette(handler), methods=["POST"])])
    )


def fastapi_app(receiver, handler):
    app = FastAPI()
    app.post("/hook")(receiver.starlette(handler))
    app.openapi()  # the endpoint's annotations can be read
    return Application(app)


def flask_app(receiver, handler):
    app = flask.Flask(__name__)
    app.config["PROPAGATE_EXCEPTIONS"] = True
    app.post("/hook")(receiver.flask(handler))
    return FlaskApplication(app)


@pytest.fixture(
    params=[starlette_app, fastapi_app, flask_app], ids=["starlette", "fastapi", "flask"]
)
def application(request):
    return request.param


def test_a_signed_call_is_handled_and_its_result_answered(application, secret, call):
    def work(delivery):
        return {"got": delivery.payload, "attempt": delivery.attempt}

    app = application(Receiver(secret), work)
    status, headers, body = app.post(*call({"to": "ada ü"}))
    assert (status, headers["content-type"]) == (200, "application/json")
    assert body == '{"got":{"to":"ada ü"},"attempt":1}'.encode()


def test_a_forged_call_is_refused(application, secret, call):
    app = application(Receiver(secret), pytest.fail)
    headers, body = call(1)
    assert app.post(headers | {"webhook-signature": "v1,AAAA"}, body)[0] == 401
    assert app.post({}, body)[0] == 401


def test_a_duplicate_is_answered_and_not_handled(application, secret, call):
    handled = []
    app = application(Receiver(secret), lambda delivery: handled.append(delivery.attempt))
    assert app.post(*call(1))[0] == 204
    status, headers, body = app.post(*call(1, attempt=2))
    assert (status, headers["tickwheel-duplicate"], body) == (204, "true", b"")
    assert handled == [1]


def test_values_become_statuses(application, secret, call):
    values = [Retry(5), Accepted()]
    app = application(Receiver(secret), lambda _: values.pop(0))
    status, headers, _ = app.post(*call(1))
    assert (status, headers["retry-after"]) == (409, "5")
    assert app.post(*call(1))[0] == 202


def test_a_handlers_exception_goes_to_the_framework_and_the_task_is_retried(
    application, secret, call
):
    outcomes = [LookupError("no such order"), None]

    def work(_):
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome

    app = application(Receiver(secret), work)
    with pytest.raises(LookupError, match="no such order"):
        app.post(*call(1))
    assert app.post(*call(1, attempt=2))[0] == 204


def test_a_body_over_the_limit_is_not_read(application, secret, call):
    app = application(Receiver(secret, max_body=100), lambda _: None)
    assert app.post(*call("x" * 200))[0] == 413
    assert app.post(*call("x" * 98))[0] == 204


def test_only_post_is_accepted(application, secret, call):
    app = application(Receiver(secret), pytest.fail)
    assert app.post(*call(1), method="PUT")[0] == 405


@pytest.mark.parametrize("make", [starlette_app, fastapi_app])
def test_a_coroutine_function_runs_on_the_loop_and_a_plain_one_on_a_thread(make, secret, call):
    where = []

    async def awaited(_):
        asyncio.get_running_loop()
        where.append(threading.current_thread())

    def plain(_):
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            pytest.fail("a plain handler must not hold the loop")
        where.append(threading.current_thread())

    class Callable:
        async def __call__(self, _):
            where.append(threading.current_thread())

    for handler in (awaited, plain, Callable()):
        assert make(Receiver(secret), handler).post(*call(1))[0] == 204
    main = threading.current_thread()
    assert [thread is main for thread in where] == [True, False, True]


class BlockedHandler:
    """A plain handler that blocks until the test lets it return or raise."""

    def __init__(self, outcome):
        self.outcome = outcome
        self.attempts = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, delivery):
        self.attempts.append(delivery.attempt)
        self.begun.set()
        assert self.go_on.wait(30)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


async def cancel_call(app, call, begun):
    """Cancel a call once its handler has begun."""
    calling = asyncio.create_task(app._asgi(*call(1), "POST"))
    assert await asyncio.to_thread(begun.wait, 30)
    calling.cancel()
    await asyncio.wait([calling])
    assert calling.cancelled()


async def wait_for_background_tasks():
    while core._background_tasks:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("make", [starlette_app, fastapi_app])
def test_a_thread_of_a_cancelled_request_stays_in_progress_until_it_returns(make, secret, call):
    handler = BlockedHandler("done")
    app = make(Receiver(secret), handler)

    async def story():
        await cancel_call(app, call, handler.begun)
        status, headers, _ = await app._asgi(*call(1, attempt=2), "POST")
        assert (status, headers["retry-after"]) == (409, "1")
        handler.go_on.set()
        await wait_for_background_tasks()
        return await app._asgi(*call(1, attempt=3), "POST")

    status, headers, body = asyncio.run(story())
    assert (status, headers["tickwheel-duplicate"], body) == (200, "true", b'"done"')
    assert handler.attempts == [1]


@pytest.mark.parametrize("outcome", [Retry(5), LookupError("no such order")])
def test_a_thread_that_fails_after_its_request_was_cancelled_is_retried(
    secret, call, caplog, outcome
):
    handler = BlockedHandler(outcome)
    app = starlette_app(Receiver(secret), handler)

    async def story():
        await cancel_call(app, call, handler.begun)
        handler.go_on.set()
        await wait_for_background_tasks()
        handler.outcome = None
        return await app._asgi(*call(1, attempt=2), "POST")

    status, headers, _ = asyncio.run(story())
    assert (status, "tickwheel-duplicate" in headers) == (204, False)
    assert handler.attempts == [1, 2]
    logged = [record.exc_info[1] for record in caplog.records if record.levelname == "ERROR"]
    assert logged == ([outcome] if isinstance(outcome, Exception) else [])


def test_a_coroutine_function_is_cancelled_with_its_request_and_retried(secret, call):
    begun, attempts = threading.Event(), []

    async def work(delivery):
        attempts.append(delivery.attempt)
        begun.set()
        if delivery.attempt == 1:
            await asyncio.Event().wait()

    app = starlette_app(Receiver(secret), work)

    async def story():
        await cancel_call(app, call, begun)
        return await app._asgi(*call(1, attempt=2), "POST")

    assert asyncio.run(story())[0] == 204
    assert attempts == [1, 2]


def test_flask_refuses_a_coroutine_function_at_once(secret):
    async def close_order(delivery):
        pass

    with pytest.raises(TypeError, match="Flask needs a plain one"):
        Receiver(secret).flask(close_order)


def test_a_view_is_named_after_its_handler(secret):
    def close_order(delivery):
        """Close an order."""

    receiver = Receiver(secret)
    for made in (receiver.flask(close_order), receiver.starlette(close_order)):
        assert (made.__name__, made.__doc__) == ("close_order", "Close an order.")


def test_the_applications_of_the_docs_answer_a_signed_call(secret, call, monkeypatch):
    page = Path(__file__).parents[2] / "docs/how-to/service-receive.md"
    code = re.search(r"^```py\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)[
        1
    ].replace('"/expire"', '"/hook"')
    monkeypatch.setenv("TICKWHEEL_WEBHOOK_SECRET", secret)
    names = {}
    exec(code, names)
    for number, name in enumerate(("app", "api")):
        headers, body = call({"order": name}, task_id=f"{number:032x}")
        status, _, body = Application(names[name]).post(headers, body)
        assert (status, body) == (200, b'{"expired":"%s"}' % name.encode())

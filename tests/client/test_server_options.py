"""The options of both clients: server, token, namespace, timeout and retries."""

import traceback
import warnings

import pytest

from client.fake import CLOSE, TASK, problem
from tickwheel.client import (
    ApiError,
    AsyncClient,
    Client,
    InsecureToken,
    ServerUnavailable,
    problem_of,
)

TOKEN = "tw_0123456789ab_a-secret-that-nobody-may-see"
ID = TASK["id"]


def test_the_token_and_namespace_are_sent(make, server):
    make(server.url, TOKEN, "acme").list()
    assert server.asked[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert server.asked[0].headers["tickwheel-namespace"] == "acme"
    assert server.asked[0].headers["user-agent"].startswith("tickwheel/")


def test_server_token_and_namespace_come_from_the_environment(make, server, monkeypatch):
    monkeypatch.setenv("TICKWHEEL_SERVER", server.url)
    monkeypatch.setenv("TICKWHEEL_TOKEN", TOKEN)
    monkeypatch.setenv("TICKWHEEL_NAMESPACE", "acme")
    client = make()
    client.list()
    assert client.server == server.url
    assert server.asked[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert server.asked[0].headers["tickwheel-namespace"] == "acme"


def test_an_empty_namespace_is_refused(make, server, monkeypatch):
    monkeypatch.setenv("TICKWHEEL_NAMESPACE", "acme")
    with pytest.raises(ValueError, match="namespace"):
        make(server.url, namespace="")


def test_the_default_server_is_on_this_machine(make):
    assert make().server == "http://127.0.0.1:7380"


def test_a_servers_url_may_have_a_path(make, server):
    make(server.url + "/tick/").list()
    assert server.asked[0].path == "/tick/v1/tasks?limit=100"


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:7380",
        "ftp://x",
        "http://",
        "http://u:pass-word@x",
        "http://x?a=b",
        "http://x#a",
        "http://x:99999",
        "http://x/a b",
        "http://[::1",
    ],
)
def test_an_invalid_server_is_refused_without_showing_its_password(make, url):
    with pytest.raises(ValueError, match="a server must be http") as refused:
        make(url)
    assert "pass-word" not in str(refused.value)


def test_the_token_is_never_shown(make, server):
    client = make(server.url, TOKEN, retries=1)
    seen = [repr(client.client), str(client.client), repr(vars(client.client))]
    seen.append(repr(vars(client.client._servers.current)))
    server.otherwise = CLOSE
    try:
        client.get(ID)
    except ServerUnavailable as error:
        told = traceback.TracebackException.from_exception(error, capture_locals=True)
        # http.client's own frames hold the request for a moment; ours never do.
        ours = [
            repr(frame.locals)
            for part in (told, told.__cause__)
            for frame in part.stack
            if "/tickwheel/client/" in frame.filename
        ]
        seen += [str(error), repr(error), repr(problem_of(error)), *ours]
    server.otherwise = problem(401, "unauthorized")
    with pytest.raises(ApiError) as refused:
        client.get(ID)
    seen += [str(refused.value), repr(refused.value.problem)]
    with pytest.raises(ValueError, match="printable") as wrong:
        make(server.url, TOKEN + "\r\nx: y")
    seen.append(str(wrong.value))
    assert not [text for text in seen if "nobody-may-see" in text]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_url_that_ends_in_v1_is_a_warning(kind):
    with pytest.warns(UserWarning, match="ends in /v1, which the client adds itself") as warned:
        kind("http://127.0.0.1:7380/v1/")
    assert len(warned) == 1
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind("http://127.0.0.1:7380/jobs")  # an application may have mounted the API there


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("server", ["http://10.1.2.3", "http://tasks.example:7380"])
def test_a_token_over_plain_http_to_another_machine_is_a_warning(kind, server):
    with pytest.warns(InsecureToken, match="use https") as warned:
        kind(server, TOKEN)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert TOKEN not in str(warned[0].message)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("server", "token"),
    [
        ("https://tasks.example", TOKEN),
        ("http://tasks.example", None),
        ("http://localhost:1", TOKEN),
        ("http://[::1]:1", TOKEN),
        ("http://127.9.9.9", TOKEN),
    ],
)
def test_a_token_over_https_or_loopback_is_not_a_warning(kind, server, token):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind(server, token)


@pytest.mark.parametrize("options", [{"timeout": 0}, {"timeout": -1}, {"retries": -1}])
def test_invalid_options_are_refused(make, options):
    with pytest.raises(ValueError):
        make("http://127.0.0.1:1", **options)

"""Several servers of one store: both clients go on to the next, and no task is submitted twice."""

import threading

import pytest

from client.fake import CLOSE, HANG, TASK, FakeServer, Reply, problem
from client.service import Service, until
from tickwheel.client import ServerTimedOut, ServerUnavailable
from tickwheel.client.retries import MAX_POLL_SECONDS
from tickwheel.client.servers import Servers

ID = TASK["id"]
STORED = Reply(201, TASK)
FOUND = Reply(200, TASK)


@pytest.fixture
def other():
    with FakeServer() as fake:
        yield fake


@pytest.fixture
def both(make, server, other):
    return make([server.url, other.url], retries=0)


def test_a_server_that_cannot_be_reached_is_left_at_once_and_for_good(both, server, other):
    server.stop()
    try:
        other.otherwise = FOUND
        assert both.get(ID).id == ID
        assert both.get(ID).id == ID
        assert (both.waits, both.server, len(other.asked)) == ([], other.url, 2)
    finally:
        server.start()
    other.stop()
    try:
        server.otherwise = FOUND
        assert both.get(ID).id == ID
        assert both.server == server.url
    finally:
        other.start()


def test_a_submit_whose_answer_is_lost_has_the_same_key_at_the_next_server(both, server, other):
    server.say(CLOSE)
    other.say(STORED)
    assert both.submit("mail", {"to": "ada"}).id == ID
    [first], [second] = server.asked, other.asked
    assert first.body == second.body
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]


def test_a_request_that_may_not_be_repeated_is_not_sent_to_the_next_one(both, server, other):
    server.otherwise = CLOSE
    with pytest.raises(ServerUnavailable) as failed:
        both.replay(ID, force=True)
    assert failed.value.sent
    assert (len(server.asked), other.asked) == (1, [])


def test_but_it_is_if_the_first_one_could_not_be_reached(both, server, other):
    server.stop()
    try:
        other.say(STORED)
        assert both.replay(ID, force=True).id == ID
    finally:
        server.start()


def test_a_server_that_does_not_answer_ends_the_try(make, server, other):
    client = make(f"{server.url}, {other.url}", retries=0, timeout=0.3)
    server.otherwise = HANG
    other.otherwise = FOUND
    with pytest.raises(ServerTimedOut):
        client.get(ID)
    assert other.asked == []
    assert client.get(ID).id == ID  # it has been left


def test_after_503_the_retry_goes_to_the_next_one(make, server, other):
    client = make([server.url, other.url], retries=1)
    server.say(problem(503, "store_unavailable"))
    other.say(FOUND)
    assert client.get(ID).id == ID
    assert (len(server.asked), len(other.asked), len(client.waits)) == (1, 1, 1)


def test_if_none_can_be_reached_the_last_failure_is_raised_after_the_retries(make, server, other):
    client = make([server.url, other.url], retries=2)
    server.stop()
    other.stop()
    try:
        with pytest.raises(ServerUnavailable, match=str(other.port)) as failed:
            client.get(ID)
        assert "tries: 3" in failed.value.__notes__
        assert len(client.waits) == 2
    finally:
        server.start()
        other.start()


def test_servers_come_from_the_environment_too(make, server, other, monkeypatch):
    monkeypatch.setenv("TICKWHEEL_SERVER", f"{server.url},{other.url}")
    server.say(CLOSE)
    other.say(FOUND)
    assert make(retries=0).get(ID).id == ID


@pytest.mark.parametrize("urls", ["http://a:1,", "http://a:1,ftp://b", ["http://a:1", ""]])
def test_each_of_them_must_be_a_url(make, urls):
    with pytest.raises(ValueError, match="a server must be http"):
        make(urls)


@pytest.mark.parametrize("urls", [5, b"http://a:1", ["http://a:1", None]])
def test_each_of_them_must_be_text(make, urls):
    with pytest.raises(TypeError, match="server must be a URL"):
        make(urls)


def test_a_server_that_another_thread_has_left_is_left_once():
    servers = Servers("http://a:1,http://b:1", None, None)
    first = servers.current
    servers.leave(first)
    servers.leave(first)
    assert servers.current is servers.all[1]


def test_wait_returns_the_task_that_has_ended(client, server):
    for _ in range(7):
        server.say(FOUND)
    server.say(Reply(200, TASK | {"state": "finished"}))
    assert client.wait(ID).state == "finished"
    assert client.waits == [0.1, 0.2, 0.4, 0.8, *[MAX_POLL_SECONDS] * 3]


def test_wait_ends_with_its_time(client, server):
    server.otherwise = FOUND
    with pytest.raises(TimeoutError, match=f"task {ID} has not ended after 0 s"):
        client.wait(ID, timeout=0)
    assert len(server.asked) == 1


def test_when_a_server_is_killed_every_submit_is_stored_once(make, tmp_path):
    first, second = Service(tmp_path), Service(tmp_path)
    client = make([first.url, second.url])
    client.client._sleep = client.really_sleep
    client.put_service("mail", endpoint="http://127.0.0.1:9/")
    ids = []

    def kill():
        until(lambda: len(ids) > 20)
        first.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        for number in range(200):
            ids.append(client.submit("mail", number, delay=3600).id)
        killer.join()
        stored = client.all(client.iterate(service="mail", limit=1_000))
        assert sorted(task.id for task in stored) == sorted(ids)
        assert sorted(task.payload for task in stored) == [*range(200)]
        assert client.server == second.url
    finally:
        killer.join()
        first._log.close()
        second.close()

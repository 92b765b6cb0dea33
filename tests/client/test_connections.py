"""Connections of both clients: reuse, restarts, forks, threads and event loops."""

import asyncio
import os
import threading

import pytest

from client.fake import CLOSE, TASK, Reply
from tickwheel.client import (
    AsyncClient,
    Client,
)

ID = TASK["id"]
STORED = Reply(201, TASK)


def test_connections_are_reused(client, server):
    for _ in range(20):
        client.list()
    assert server.accepted == 1


def test_an_idle_connection_closed_by_the_server_is_replaced_without_a_wait(client, server):
    client.list()
    server.hang_up()
    client.list()
    assert client.waits == []
    assert server.accepted == 2


def test_a_reused_connection_that_breaks_is_replaced_without_a_wait(client, server):
    server.say(STORED, CLOSE, STORED)
    client.submit("mail")
    client.submit("mail")
    assert client.waits == []
    assert server.accepted == 2
    assert server.asked[1].headers["idempotency-key"] == server.asked[2].headers["idempotency-key"]


def test_connection_close_ends_the_connection(client, server):
    server.say(Reply(200, TASK, {"connection": "close"}))
    client.get(ID)
    client.list()
    assert server.accepted == 2


def test_a_client_reconnects_to_a_restarted_server(client, server):
    client.list()
    server.stop()
    recorded = client._sleep
    starts = iter([None, None, server.start])

    def sleep_and_start(seconds):
        waited = recorded(seconds)
        start = next(starts)
        if start is not None:
            start()
        return waited

    client.client._sleep = sleep_and_start
    server.say(STORED)
    assert client.submit("mail").id == ID
    assert len(client.waits) == 3


def test_a_closed_client_raises(make, server):
    client = make(server.url)
    client.list()
    client.close_client = client.client.close()
    if client.close_client is not None:
        client.run(client.close_client)
    for verb in (client.list, lambda: client.replay(ID, force=True)):
        with pytest.raises(RuntimeError, match="closed"):
            verb()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_client_survives_fork(client, server):
    server.otherwise = Reply(200, TASK)
    client.get(ID)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            if isinstance(client.client, AsyncClient):
                task = asyncio.Runner().run(client.client.get(ID))
            else:
                task = client.get(ID)
            os.write(write, task.id.encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as told:
        assert told.read() == ID
    assert os.waitpid(child, 0)[1] == 0
    client.get(ID)
    assert server.accepted == 2  # the child's and the parent's


def test_threads_share_a_client(server):
    server.otherwise = lambda asked: Reply(200, {**TASK, "id": asked.path.rpartition("/")[2]})
    wrong = []
    with Client(server.url) as client:

        def ask(name):
            for number in range(50):
                task_id = f"{name}-{number}"
                if client.get(task_id).id != task_id:
                    wrong.append(task_id)

        threads = [threading.Thread(target=ask, args=(name,)) for name in "abcdef"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert len(server.asked) == 300
    assert server.accepted < 60


def test_concurrent_calls_get_their_own_answers(server):
    server.otherwise = lambda asked: Reply(200, {**TASK, "id": asked.path.rpartition("/")[2]})

    async def ask():
        async with AsyncClient(server.url) as client:
            names = [f"t-{number}" for number in range(300)]
            tasks = await asyncio.gather(*map(client.get, names))
            assert [task.id for task in tasks] == names

    asyncio.run(ask())


def test_an_async_client_belongs_to_one_loop_until_it_is_closed(server):
    client = AsyncClient(server.url)
    first = asyncio.Runner()
    first.run(client.list())

    def elsewhere():
        with pytest.raises(RuntimeError, match="another event loop"):
            asyncio.run(client.list())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    first.run(client._pool.close())
    first.close()
    with asyncio.Runner() as second:
        second.run(client.list())
        second.run(client.close())

"""A proxy between a server and PostgreSQL loses answers."""

from contextlib import suppress

from proxies import Proxy
from service.harness import QUICK
from web.serving import wait_until

ONCE = {"timeout": 3600, "max_attempts": 1, "backoff": QUICK, "concurrency": 100}
SHARE = 0.05  # of the answers that the proxy loses
UNSENT = "claimed, not sent: the answer to the claim was lost"


def test_a_claim_whose_answer_is_lost_costs_no_attempt(
    make_server, postgres_server, postgres_url, receiver
):
    """With one attempt allowed, no task fails without a call, and none is called twice."""
    with Proxy(postgres_server.port) as proxy:
        server = make_server(proxy.url_for(postgres_url), errors=True)
        server.service("work", receiver.watch("/work"), **ONCE)
        ids = []
        for _ in range(10):  # each loses the answer to a claim in three of four runs
            bodies = [{"service": "work", "delay": 1 + n / 100} for n in range(200)]
            items = server.post("/v1/tasks/batch", bodies, status=200).json["items"]
            batch = [item["id"] for item in items]
            proxy.loses = SHARE
            receiver.wait(lambda batch=batch: receiver.ids("/work") >= set(batch))
            proxy.heal()
            ids += batch
            if any(released(server, one) for one in batch):
                break
        else:
            raise AssertionError("no answer to a claim was lost")
        server.drained()
        tasks = [server.ended(one) for one in ids]
        assert {(task["state"], task["failures"]) for task in tasks} == {("finished", 0)}
        assert all(len(attempts) == 1 for attempts in receiver.attempts().values())
        server.stop()


def released(server, task_id):
    """Return whether an attempt of a task was released without a call."""
    with suppress(KeyError):
        return ("release", UNSENT) in server.events(task_id)
    return False


def test_a_silent_network_causes_no_second_call(
    make_server, postgres_server, postgres_url, receiver
):
    """The proxy forwards nothing for a while, but keeps connections open."""
    with Proxy(postgres_server.port) as proxy:
        server = make_server(proxy.url_for(postgres_url), errors=True)
        server.service("work", receiver.watch("/work"), **ONCE)
        bodies = [{"service": "work", "delay": 1 + n / 50} for n in range(200)]
        items = server.post("/v1/tasks/batch", bodies, status=200).json["items"]
        ids = {item["id"] for item in items}
        receiver.wait(lambda: receiver.ids("/work"))
        proxy.silent = True
        wait_until(lambda: server.get("/readyz").status == 503, "it notices")
        proxy.heal()
        receiver.wait(lambda: receiver.ids("/work") == ids)
        server.drained()
        assert {server.ended(one)["state"] for one in ids} == {"finished"}
        assert all(len(attempts) == 1 for attempts in receiver.attempts().values())
        server.stop()

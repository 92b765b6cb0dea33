"""Idempotent submits: the same key and body again are answered, and stored once."""

import asyncio
import json
from itertools import pairwise

import pytest

from tickwheel.values.task import Idempotency
from web.serving import Api

KEY = {"idempotency-key": "order-1"}


@pytest.fixture
def mail(either_api):
    either_api.service(enabled=False)
    return either_api


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    with Api(f"sqlite:///{tmp_path_factory.mktemp('strict')}/tasks.db") as api:
        api.service(enabled=False)
        yield api


def count(api):
    return len(api.get("/v1/tasks?limit=1000").json["items"])


def test_the_same_request_again_is_answered_with_the_same_task(mail):
    body = {"service": "mail", "payload": {"a": 1}, "delay": 60}
    first = mail.post("/v1/tasks", body, headers=KEY, status=201)
    again = mail.post("/v1/tasks", body, headers=KEY, status=201)
    assert again.json == first.json
    assert again.headers["location"] == first.headers["location"]
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert count(mail) == 1


def test_another_body_under_the_same_key_is_422(mail):
    first = mail.post("/v1/tasks", {"service": "mail", "delay": 60}, headers=KEY, status=201)
    answer = mail.post("/v1/tasks", {"service": "mail", "delay": 61}, headers=KEY)
    answer.refused(422, "idempotency_key_reused")
    assert [one["id"] for one in mail.get("/v1/tasks").json["items"]] == [first.json["id"]]


def test_another_key_is_another_task(mail):
    body = {"service": "mail", "delay": 60}
    ids = {
        mail.post("/v1/tasks", body, headers={"idempotency-key": f"k{n}"}, status=201).json["id"]
        for n in range(3)
    }
    assert len(ids) == 3


def test_of_concurrent_requests_one_is_stored_and_all_get_it(mail):
    request = ("POST", "/v1/tasks", {"service": "mail", "delay": 60}, {"headers": KEY})
    answers = mail.together(*[request] * 30)
    assert {one.status for one in answers} == {201}
    assert len({one.json["id"] for one in answers}) == 1
    assert sum("idempotency-replayed" not in one.headers for one in answers) == 1
    assert count(mail) == 1


def test_of_concurrent_requests_with_different_bodies_one_is_stored(mail):
    requests = [
        ("POST", "/v1/tasks", {"service": "mail", "delay": 60, "payload": n}, {"headers": KEY})
        for n in range(20)
    ]
    answers = mail.together(*requests)
    assert sorted(one.status for one in answers) == [201] + [422] * 19
    assert count(mail) == 1


def test_duplicates_on_two_nodes_at_once_are_one_task(postgres_url, make_api):
    one, two = make_api(postgres_url), make_api(postgres_url, dispatch=False)
    one.service(enabled=False)
    two.run(two.node.directory.refresh())
    for number in range(5):
        body = {"service": "mail", "delay": 60, "payload": number}
        headers = {"idempotency-key": f"k{number}"}

        async def both(body=body, headers=headers):
            # Two loops cannot run in one thread: the second node's runs in another.
            there = asyncio.to_thread(two.post, "/v1/tasks", body, headers=headers)
            here = one.asked("POST", "/v1/tasks", body, headers=headers)
            return await asyncio.gather(here, there)

        found = one.run(both())
        assert {answer.status for answer in found} == {201}
        assert len({answer.json["id"] for answer in found}) == 1
    assert count(one) == 5


def test_a_repeated_request_gets_the_current_state(api, receiver):
    api.service(endpoint=receiver.url("/ok"))
    body = {"service": "mail"}
    first = api.post("/v1/tasks", body, headers=KEY, status=201).json
    api.task_in(first["id"], "finished")
    again = api.post("/v1/tasks", body, headers=KEY, status=201).json
    assert (again["id"], again["state"]) == (first["id"], "finished")
    assert len(receiver.requests) == 1


def test_a_refused_request_leaves_its_key_free(mail):
    wrong = {"service": "nobody", "delay": 60}
    mail.post("/v1/tasks", wrong, headers=KEY).refused(422, "unknown_service")
    mail.post("/v1/tasks", {"service": "mail", "delay": 60}, headers=KEY, status=201)


def test_a_conflict_leaves_the_idempotency_key_free(mail):
    holder = mail.submit(key="k")
    body = {"service": "mail", "key": "k", "delay": 60}
    for _ in range(2):
        mail.post("/v1/tasks", body, headers=KEY).refused(409, "key_taken")
    mail.post(f"/v1/tasks/{holder['id']}/cancel", status=200)
    mail.post("/v1/tasks", body, headers=KEY, status=201)


def test_a_repeated_request_with_a_task_key_is_not_a_conflict(mail):
    body = {"service": "mail", "key": "k", "delay": 60}
    first = mail.post("/v1/tasks", body, headers=KEY, status=201).json
    again = mail.post("/v1/tasks", body, headers=KEY, status=201)
    assert again.json["id"] == first["id"]
    assert again.headers["idempotency-replayed"] == "true"
    mail.post("/v1/tasks", body).refused(409, "key_taken")


def test_a_repeated_keep_returns_the_same_holder(mail):
    holder = mail.submit(key="k")
    body = {"service": "mail", "key": "k", "on_conflict": "keep", "delay": 60}
    first = mail.post("/v1/tasks", body, headers=KEY)
    again = mail.post("/v1/tasks", body, headers=KEY)
    assert (first.status, first.json["id"]) == (200, holder["id"])
    assert (again.status, again.json["id"]) == (201, holder["id"])  # always, for a repeated request
    assert again.headers["idempotency-replayed"] == "true"


def test_a_repeated_replace_changes_nothing(mail):
    mail.submit(key="k", payload=1)
    body = {"service": "mail", "key": "k", "payload": 2, "on_conflict": "replace", "delay": 60}
    first = mail.post("/v1/tasks", body, headers=KEY)
    later = {**body, "payload": 3}
    mail.post("/v1/tasks", later)
    again = mail.post("/v1/tasks", body, headers=KEY)
    assert again.json["id"] == first.json["id"]
    assert again.headers["idempotency-replayed"] == "true"
    assert mail.get(f"/v1/tasks/{first.json['id']}").json["payload"] == 3


@pytest.mark.parametrize("key", ["", " ", "x" * 201, "é", "a\x01b"])
def test_an_invalid_key_is_400(strict, key):
    body = {"service": "mail", "delay": 60}
    answer = strict.post("/v1/tasks", body, headers={"idempotency-key": key})
    assert "Idempotency-Key" in answer.refused(400, "bad_request")["detail"]
    assert count(strict) == 0


def test_each_namespace_has_its_own_keys(mail):
    acme = {"tickwheel-namespace": "acme"}
    mail.put("/v1/services/mail", {"endpoint": "http://127.0.0.1:9/"}, headers=acme, status=201)
    body = {"service": "mail", "delay": 60}
    one = mail.post("/v1/tasks", body, headers=KEY, status=201)
    two = mail.post("/v1/tasks", body, headers={**KEY, **acme}, status=201)
    assert one.json["id"] != two.json["id"]
    assert "idempotency-replayed" not in two.headers


class TestBatch:
    def test_each_task_has_its_own_key(self, mail):
        items = [{"service": "mail", "delay": 60, "idempotency_key": f"k{n}"} for n in range(5)]
        first = mail.post("/v1/tasks/batch", items, status=200).json
        again = mail.post("/v1/tasks/batch", items, status=200).json
        assert [one["id"] for one in first["items"]] == [one["id"] for one in again["items"]]
        assert {one["status"] for one in first["items"] + again["items"]} == {201}
        assert count(mail) == 5

    def test_a_key_in_the_header_is_refused(self, strict):
        answer = strict.post("/v1/tasks/batch", [{"service": "mail"}], headers=KEY)
        answer.refused(400, "bad_request")
        assert answer.json["detail"] == "in a batch each task has its own idempotency_key"

    def test_the_same_twice_in_one_batch_is_one_task(self, mail):
        item = {"service": "mail", "delay": 60, "idempotency_key": "k"}
        found = mail.post("/v1/tasks/batch", [item, item, item], status=200).json["items"]
        assert len({one["id"] for one in found}) == 1
        assert count(mail) == 1

    def test_a_reused_key_refuses_only_its_own_task(self, mail):
        items = [
            {"service": "mail", "delay": 60, "payload": n, "idempotency_key": "k"} for n in (1, 2)
        ]
        found = mail.post("/v1/tasks/batch", items, status=200).json["items"]
        assert [one["status"] for one in found] == [201, 422]
        assert found[1]["problem"]["code"] == "idempotency_key_reused"

    def test_concurrent_batches_store_each_task_once(self, mail):
        items = [{"service": "mail", "delay": 60, "idempotency_key": f"k{n}"} for n in range(50)]
        answers = mail.together(*[("POST", "/v1/tasks/batch", items, {})] * 6)
        found = [[one.get("id") for one in answer.json["items"]] for answer in answers]
        assert all(one == two for one, two in pairwise(found))
        assert count(mail) == 50

    def test_a_line_and_an_item_with_the_same_text_are_the_same_request(self, mail):
        text = json.dumps({"service": "mail", "delay": 60, "idempotency_key": "k"}).encode()
        one = mail.post("/v1/tasks/batch", b"[" + text + b"]", status=200).json
        two = mail.post("/v1/tasks/batch", text, media="application/x-ndjson", status=200).json
        assert one["items"][0]["id"] == two["items"][0]["id"]


def test_after_a_day_a_key_is_forgotten(mail):
    body = {"service": "mail", "delay": 60}
    first = mail.post("/v1/tasks", body, headers=KEY, status=201).json
    registry = mail.node.store.registry
    assert mail.run(registry.prune(int(mail.node.store.now_ms()) + 1_000, 100)) == 1
    assert mail.post("/v1/tasks", body, headers=KEY, status=201).json["id"] != first["id"]


def test_a_repeated_request_for_a_deleted_task_is_409(mail):
    body = {"service": "mail", "delay": 60}
    first = mail.post("/v1/tasks", body, headers=KEY, status=201).json
    mail.post(f"/v1/tasks/{first['id']}/cancel", status=200)
    store = mail.node.store
    assert mail.run(store.prune(int(store.now_ms()) + 1_000, 100)) == 1
    mail.post("/v1/tasks", body, headers=KEY).refused(409, "task_gone")
    batch = [{**body, "idempotency_key": "b"}]
    (item,) = mail.post("/v1/tasks/batch", batch, status=200).json["items"]
    mail.post(f"/v1/tasks/{item['id']}/cancel", status=200)
    assert mail.run(store.prune(int(store.now_ms()) + 1_000, 100)) == 1
    (item,) = mail.post("/v1/tasks/batch", batch, status=200).json["items"]
    assert (item["status"], item["problem"]["code"]) == (409, "task_gone")


def test_a_key_is_kept_with_its_caller_and_a_digest():
    assert Idempotency._fields == ("caller", "key", "digest")


def test_keys_of_the_embedded_api_are_separate(mail):
    body = {"service": "mail", "delay": 60}
    over_http = mail.post("/v1/tasks", body, headers=KEY, status=201).json["id"]
    options = {"delay": 60, "idempotency_key": "order-1"}
    embedded = mail.run(mail.scheduler.submit("mail", None, **options)).id
    assert embedded != over_http
    assert mail.post("/v1/tasks", body, headers=KEY, status=201).json["id"] == over_http
    assert mail.run(mail.scheduler.submit("mail", None, **options)).id == embedded

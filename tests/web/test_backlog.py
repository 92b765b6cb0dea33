"""The backlog over HTTP: final tasks, and their replays."""

import pytest

from web.serving import UNKNOWN_ID, Api


@pytest.fixture
def mail(either_api):
    either_api.service(enabled=False)
    return either_api


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    with Api(f"sqlite:///{tmp_path_factory.mktemp('strict')}/tasks.db") as api:
        yield api


def cancelled(api, **options):
    """Return a cancelled task."""
    task = api.submit(**options)
    api.post(f"/v1/tasks/{task['id']}/cancel", status=200)
    return task["id"]


def test_it_has_final_tasks_newest_first(mail):
    live = mail.submit()["id"]
    ids = [cancelled(mail, key=f"k{n}") for n in range(4)]
    page = mail.get("/v1/backlog?limit=3", status=200).json
    rest = mail.get(f"/v1/backlog?limit=3&cursor={page['next_cursor']}", status=200).json
    found = [one["id"] for one in page["items"] + rest["items"]]
    assert found == sorted(ids, reverse=True)
    assert rest["next_cursor"] is None
    assert live not in found


def test_filters_combine(mail):
    mail.service("print", enabled=False)
    one = cancelled(mail, key="a")
    two = cancelled(mail, service="print", key="a")

    def ids(query):
        found = mail.get(f"/v1/backlog?{query}", status=200).json["items"]
        return {item["id"] for item in found}

    assert ids("key=a") == {one, two}
    assert ids("service=print&key=a") == {two}
    assert ids("state=cancelled&service=mail") == {one}
    assert ids("state=finished") == set()


@pytest.mark.parametrize(
    "query",
    ["state=delay", "state=running", "limit=0", "cursor=x", "due_before=2126-01-01T00:00:00Z"],
)
def test_a_wrong_query_is_422(strict, query):
    strict.get(f"/v1/backlog?{query}").refused(422, "invalid")


def test_a_replay_is_a_new_task_and_each_names_the_other(mail):
    payload = {"a": [1, 2]}
    old = cancelled(mail, payload=payload, key="k", priority=3, max_attempts=2)
    answer = mail.post(f"/v1/backlog/{old}/replay", {"delay": 60}, status=201)
    new = answer.json
    assert answer.headers["location"] == f"/v1/tasks/{new['id']}"
    assert new["id"] != old
    assert (new["replay_of"], new["payload"], new["key"]) == (old, payload, "k")
    assert (new["priority"], new["max_attempts"], new["attempt"]) == (3, 2, 0)
    assert new["state"] == "delay"
    assert mail.get(f"/v1/tasks/{old}").json["replayed_as"] == new["id"]


@pytest.mark.parametrize("body", [None, b"", {}], ids=["no body", "an empty body", "no words"])
def test_without_a_time_it_is_due_now(api, receiver, body):
    api.service(endpoint=receiver.url("/ok"))
    old = cancelled(api)
    new = api.post(f"/v1/backlog/{old}/replay", body, status=201).json
    api.task_in(new["id"], "finished")


def test_it_may_be_due_at_a_time(mail):
    old = cancelled(mail)
    body = {"due_at": "2126-01-01T00:00:00Z"}
    new = mail.post(f"/v1/backlog/{old}/replay", body, status=201).json
    assert new["due_at"] == "2126-01-01T00:00:00.000Z"


def test_a_second_replay_needs_force(mail):
    old = cancelled(mail)
    path = f"/v1/backlog/{old}/replay"
    first = mail.post(path, {"delay": 60}, status=201).json["id"]
    mail.post(path, {"delay": 60}).refused(409, "already_replayed")
    second = mail.post(path, {"delay": 60, "force": True}, status=201).json["id"]
    assert second != first


def test_of_concurrent_replays_one_wins(mail):
    path = f"/v1/backlog/{cancelled(mail)}/replay"
    answers = mail.together(*[("POST", path, {"delay": 60}, {})] * 10)
    assert sorted(one.status for one in answers) == [201] + [409] * 9


def test_a_live_task_cannot_be_replayed(mail):
    task = mail.submit()
    mail.post(f"/v1/backlog/{task['id']}/replay", {}).refused(409, "already_replayed")


def test_a_replay_whose_key_is_taken_is_409_with_the_holder(mail):
    old = cancelled(mail, key="k")
    holder = mail.submit(key="k")
    answer = mail.post(f"/v1/backlog/{old}/replay", {})
    assert answer.refused(409, "key_taken")["holder"] == holder["id"]


@pytest.mark.parametrize("task_id", [UNKNOWN_ID, "x", "é"])
def test_an_unknown_id_is_404(strict, task_id):
    strict.post(f"/v1/backlog/{task_id}/replay", {}).refused(404, "unknown_task")


@pytest.mark.parametrize(
    "body",
    [{"delay": -1}, {"delay": 1, "due_at": "2126-01-01T00:00:00Z"}, {"force": "yes"}, {"when": 1}],
    ids=str,
)
def test_an_invalid_replay_is_422(strict, body):
    strict.post(f"/v1/backlog/{UNKNOWN_ID}/replay", body).refused(422, "invalid")


def test_a_bulk_replay_takes_the_failed_tasks_by_default(mail, receiver):
    mail.service(endpoint=receiver.url("/broken"), max_attempts=1, breaker=None)
    failed = [mail.submit(delay=0)["id"] for _ in range(3)]
    for task_id in failed:
        mail.task_in(task_id, "failed")
    mail.service(endpoint=receiver.url("/ok"))
    cancelled(mail)
    body = {"state": "failed"}
    assert mail.post("/v1/backlog/replay", body, status=200).json == {"replayed": 3}
    assert mail.post("/v1/backlog/replay", body, status=200).json == {"replayed": 0}
    for task_id in failed:
        mail.task_in(mail.get(f"/v1/tasks/{task_id}").json["replayed_as"], "finished")


def test_a_bulk_replay_is_limited_by_its_filter(mail):
    mail.service("print", enabled=False)
    cancelled(mail, key="a")
    cancelled(mail, key="b")
    cancelled(mail, service="print", key="a")
    body = {"state": "cancelled", "service": "mail", "key": "a"}
    assert mail.post("/v1/backlog/replay", body, status=200).json == {"replayed": 1}
    assert mail.post("/v1/backlog/replay", body, status=200).json == {"replayed": 0}


@pytest.mark.parametrize(
    "body",
    [{}, {"force": True}, {"state": "delay"}, {"service": ""}, {"limit": 5}, []],
    ids=str,
)
def test_a_bulk_replay_without_a_valid_filter_is_422(strict, body):
    strict.post("/v1/backlog/replay", body).refused(422, "invalid")

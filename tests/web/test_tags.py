"""Tags over HTTP: given by a submit and a batch, shown, and filtered by."""

import pytest


@pytest.fixture
def mail(either_api):
    either_api.service(enabled=False)
    either_api.service("print", enabled=False)
    return either_api


def ids(api, path):
    """Return the ids of a list."""
    return {item["id"] for item in api.get(path, status=200).json["items"]}


def test_a_task_shows_its_tags_in_their_order(mail):
    task = mail.submit(tags=["b", "a:1"])
    assert task["tags"] == ["b", "a:1"]
    assert mail.get(f"/v1/tasks/{task['id']}", status=200).json["tags"] == ["b", "a:1"]
    assert mail.submit()["tags"] == []


def test_a_batch_has_tags_and_refuses_bad_ones_alone(mail):
    tasks = [
        {"service": "mail", "tags": ["batch"]},
        {"service": "mail", "tags": ["a", "a"]},
        {"service": "mail", "tags": ["no blank"]},
    ]
    answer = mail.post("/v1/tasks/batch", tasks, status=200).json
    assert [item["status"] for item in answer["items"]] == [201, 422, 422]
    assert "must differ, got 'a' twice" in answer["items"][1]["problem"]["detail"]
    assert ids(mail, "/v1/tasks?tag=batch") == {answer["items"][0]["id"]}


@pytest.mark.parametrize(
    ("tags", "detail"),
    [
        (["a b"], 'must be 1 to 32 of A-Z a-z 0-9 . _ : -, got "a b"'),
        ([""], "must be 1 to 32 of A-Z a-z 0-9 . _ : -"),
        (["x" * 33], "must be 1 to 32 of A-Z a-z 0-9 . _ : -"),
        ("a", "tags must be an array of up to 8"),
        ([1], "must be 1 to 32 of A-Z"),
        ([*"abcdefghi"], "tags must be an array of up to 8, or null, got an array of 9"),
        (["a", "b", "a"], "the tags of a task must differ, got 'a' twice"),
    ],
)
def test_a_bad_tag_is_422_and_named(strict, tags, detail):
    refused = strict.post("/v1/tasks", {"service": "mail", "tags": tags}).refused(422, "invalid")
    assert detail in refused["detail"]
    assert strict.untouched()


@pytest.mark.parametrize("query", ["tag=a%20b", "tag=", "&".join(f"tag={n}" for n in range(9))])
def test_a_list_by_a_bad_tag_is_422(strict, query):
    assert "tag" in strict.get(f"/v1/tasks?{query}").refused(422, "invalid")["detail"]
    strict.get(f"/v1/backlog?{query}").refused(422, "invalid")


def test_lists_cancels_and_replays_go_by_one_tag_or_by_several(mail):
    both = mail.submit(tags=["import", "vip"])["id"]
    one = mail.submit(service="print", tags=["import"])["id"]
    mail.submit(tags=["export"])
    mail.submit()
    assert ids(mail, "/v1/tasks?tag=import") == {both, one}
    assert ids(mail, "/v1/tasks?tag=vip&tag=import") == {both}
    assert ids(mail, "/v1/tasks?tag=import&service=print") == {one}
    gone = mail.post("/v1/tasks/cancel", {"tag": ["import", "vip"]}, status=200).json
    assert gone == {"cancelled": 1}
    assert mail.post("/v1/tasks/cancel", {"tag": ["import"]}, status=200).json == {"cancelled": 1}
    assert ids(mail, "/v1/backlog?tag=import") == {both, one}
    again = {"tag": ["vip"], "state": "cancelled"}
    assert mail.post("/v1/backlog/replay", again, status=200).json == {"replayed": 1}
    (new,) = (
        mail.get("/v1/tasks?tag=vip&state=delay", status=200).json["items"]
        or mail.get("/v1/tasks?tag=vip&state=ready", status=200).json["items"]
    )
    assert (new["replay_of"], new["tags"]) == (both, ["import", "vip"])


def test_a_cancel_or_replay_without_a_choice_is_refused(strict):
    refused = strict.post("/v1/tasks/cancel", {"tag": []}).refused(422, "invalid")
    assert "give service, key or tag" in refused["detail"]
    refused = strict.post("/v1/backlog/replay", {"tag": []}).refused(422, "invalid")
    assert "give state, service, key or tag" in refused["detail"]

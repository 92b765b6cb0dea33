"""Schedules over HTTP: put, read, fire, delete."""

import re
from datetime import UTC, datetime

import pytest

from tickwheel.durable import Schedule
from tickwheel.web.views import schedule_view
from web.serving import MOMENT, Api


@pytest.fixture
def mail(either_api):
    either_api.service()
    return either_api


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    with Api(f"sqlite:///{tmp_path_factory.mktemp('strict')}/tasks.db") as api:
        api.service()
        yield api


def test_a_schedule_keeps_all_its_fields(mail):
    wanted = {
        "service": "mail", "payload": {"a": 1}, "cron": "30 3 * * *", "interval": None,
        "tz": "Europe/Berlin", "missed": "skip", "enabled": True, "priority": 4, "timeout": 2.5,
        "max_attempts": 2,
    }  # fmt: skip
    made = mail.put("/v1/schedules/nightly", wanted, status=201).json
    assert {"name": "nightly", **wanted}.items() <= made.items()
    assert MOMENT.fullmatch(made["next_at"])
    assert MOMENT.fullmatch(made["created_at"])
    assert datetime.fromisoformat(made["next_at"]) > datetime.now(UTC)
    assert mail.get("/v1/schedules/nightly", status=200).json == made
    assert mail.get("/v1/schedules", status=200).json == {"items": [made], "next_cursor": None}


def test_a_change_of_an_old_version_is_412_and_changes_nothing(mail):
    path, body = "/v1/schedules/nightly", {"service": "mail", "interval": 60}
    only_new = {"if-none-match": "*"}
    read = mail.put(path, body, headers=only_new, status=201).headers["etag"]
    mail.put(path, body, headers=only_new).refused(412, "schedule_changed")
    assert mail.get(path).headers["etag"] == read
    changed = {**body, "payload": {"by": "another"}}
    mail.put(path, changed, headers={"if-match": read}, status=200)
    late = mail.put(path, {**body, "priority": 3}, headers={"if-match": read})
    assert "'nightly'" in late.refused(412, "schedule_changed")["detail"]
    assert mail.get(path).json["payload"] == {"by": "another"}
    mail.put("/v1/schedules/none", body, headers={"if-match": read}).refused(
        412, "schedule_changed"
    )


def test_of_concurrent_changes_of_one_version_one_wins(mail):
    path, body = "/v1/schedules/nightly", {"service": "mail", "interval": 60}
    options = {"headers": {"if-match": mail.put(path, body).headers["etag"]}}
    answers = mail.together(*(("PUT", path, {**body, "priority": n}, options) for n in range(1, 5)))
    assert sorted(answer.status for answer in answers) == [200, 412, 412, 412]


def test_an_interval_has_defaults(mail):
    made = mail.put("/v1/schedules/often", {"service": "mail", "interval": 2.5}, status=201).json
    assert (made["interval"], made["cron"], made["tz"], made["missed"]) == (
        2.5,
        None,
        "UTC",
        "once",
    )
    assert (made["payload"], made["max_attempts"], made["enabled"]) == (None, 5, True)


def test_a_payload_is_returned_and_sent_byte_for_byte(api, receiver):
    payload = rb'{"a" : 1, "a":2, "n": 12345678901234567890123, "e": "\u00e9"}'
    api.service(endpoint=receiver.url("/ok"))
    body = b'{"service":"mail","interval":0.05,"payload":' + payload + b"}"
    answer = api.put("/v1/schedules/often", body, status=201)
    assert payload in answer.body
    assert payload in api.get("/v1/schedules/often").body
    api.until(lambda: receiver.requests)
    assert receiver.requests[0].body == payload


def test_a_schedule_fires_until_it_is_deleted(api, receiver):
    api.service(endpoint=receiver.url("/ok"))
    api.put("/v1/schedules/often", {"service": "mail", "interval": 0.05}, status=201)
    api.until(lambda: len(receiver.requests) >= 3)
    api.delete("/v1/schedules/often", status=204)
    ids = [one.header("webhook-id") for one in receiver.requests]
    assert len(set(ids)) == len(ids)
    found = api.get("/v1/tasks").json["items"]
    assert {one["state"] for one in found} <= {"finished", "running", "cancelled"}


def test_a_disabled_schedule_has_no_next_time(mail):
    body = {"service": "mail", "interval": 60, "enabled": False}
    assert mail.put("/v1/schedules/off", body, status=201).json["next_at"] is None


def test_a_put_replaces_all_fields(mail):
    mail.put("/v1/schedules/a", {"service": "mail", "interval": 60, "payload": 1, "priority": 3})
    changed = mail.put("/v1/schedules/a", {"service": "mail", "cron": "0 0 * * *"}, status=200).json
    assert (changed["interval"], changed["payload"], changed["priority"]) == (None, None, 0)


def test_deleting_cancels_the_next_firing(mail):
    mail.put("/v1/schedules/soon", {"service": "mail", "interval": 3600}, status=201)
    mail.delete("/v1/schedules/soon", status=204)
    mail.get("/v1/schedules/soon").refused(404, "unknown_schedule")
    mail.delete("/v1/schedules/soon").refused(404, "unknown_schedule")
    assert mail.get("/v1/tasks?state=delay").json["items"] == []


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"cron": "* * * * *", "interval": 5},
        {"cron": "* * * *"},
        {"cron": "61 * * * *"},
        {"cron": "0 0 30 2 *"},
        {"cron": ""},
        {"cron": 5},
        {"cron": "* * * * *", "tz": "Mars/Olympus"},
        {"cron": "* * * * *", "tz": "../../etc/passwd"},
        {"cron": "* * * * *", "tz": ""},
        {"cron": "* * * * *", "tz": "a\0b"},
        {"interval": 5, "tz": "Mars/Olympus"},
        {"interval": 5, "tz": "UTC\0"},
        {"interval": 0},
        {"interval": -1},
        {"interval": 0.0001},
        {"interval": 1e12},
        {"interval": 5, "missed": "never"},
        {"interval": 5, "priority": 99_999},
        {"interval": 5, "max_attempts": 0},
        {"interval": 5, "timeout": 0},
        {"interval": 5, "enabled": 1},
        {"interval": 5, "key": "a"},
        {"interval": 5, "service": None},
        {"interval": 5, "service": "a/b"},
    ],
    ids=str,
)
def test_an_invalid_schedule_is_422(strict, wrong):
    answer = strict.put("/v1/schedules/a", {"service": "mail", **wrong})
    stored = strict.get("/v1/schedules").json["items"]
    if stored:
        strict.delete("/v1/schedules/a", status=204)  # the others must not find it
    assert (answer.status, answer.code in ("invalid", "out_of_range")) == (422, True), answer
    assert stored == []


def test_an_unknown_service_is_422(strict):
    body = {"service": "nobody", "interval": 5}
    strict.put("/v1/schedules/a", body).refused(422, "unknown_service")


def test_a_new_schedule_is_201_and_a_changed_one_200(mail):
    body = {"service": "mail", "interval": 3600}
    assert mail.put("/v1/schedules/a", body).status == 201
    assert mail.put("/v1/schedules/a", body).status == 200
    assert mail.put("/v1/schedules/a", body | {"interval": 60}).status == 200
    mail.delete("/v1/schedules/a", status=204)
    assert mail.put("/v1/schedules/a", body).status == 201


def test_the_next_time_is_right_even_if_its_task_is_stored():
    made, now = 1_700_000_000_000, 1_700_000_100_500
    often = Schedule("s", "mail", b"1", None, 1_000, "UTC", "once", now + 4_500, made)
    assert schedule_view(often, now).next_at == "2023-11-14T22:15:01.000Z"
    assert schedule_view(often._replace(enabled=False), now).next_at is None


def test_a_list_has_pages_by_name(mail):
    names = [f"s{number}" for number in range(5)]
    for name in reversed(names):
        mail.put(f"/v1/schedules/{name}", {"service": "mail", "interval": 3600}, status=201)
    found, cursor = [], ""
    while cursor is not None:
        page = mail.get(f"/v1/schedules?limit=2{cursor and '&cursor=' + cursor}", status=200).json
        assert len(page["items"]) <= 2
        found += [one["name"] for one in page["items"]]
        cursor = page["next_cursor"]
    assert found == names
    assert mail.get("/v1/schedules?limit=5").json["next_cursor"] is None
    mail.get("/v1/schedules?limit=0").refused(422, "invalid")
    assert mail.get("/v1/schedules?cursor=%00", status=200).json["items"] != []


def test_a_page_of_large_payloads_is_short_and_has_a_next_one(mail):
    body = {"service": "mail", "interval": 3600, "payload": "x" * 1_000_000, "enabled": False}
    for number in range(6):
        mail.put(f"/v1/schedules/s{number}", body, status=201)
    first = mail.get("/v1/schedules", status=200).json
    assert [one["name"] for one in first["items"]] == [f"s{number}" for number in range(5)]
    rest = mail.get(f"/v1/schedules?cursor={first['next_cursor']}", status=200).json
    assert ([one["name"] for one in rest["items"]], rest["next_cursor"]) == (["s5"], None)


@pytest.mark.parametrize("name", ["a b", "é", "x" * 101, "%"])
def test_an_invalid_name_is_422(strict, name):
    body = {"service": "mail", "interval": 5}
    for method, given in (("GET", None), ("PUT", body), ("DELETE", None)):
        answer = strict.request(method, f"/v1/schedules/{name}", given)
        assert re.search("name", answer.refused(422, "invalid")["detail"])


def test_a_payload_that_is_too_large_is_refused(strict):
    body = {"service": "mail", "interval": 5, "payload": "x" * (1 << 20)}
    answer = strict.put("/v1/schedules/a", body)
    answer.refused(413, "too_large")
    assert strict.get("/v1/schedules").json["items"] == []


def test_a_payload_that_is_nested_too_deeply_is_refused(strict):
    body = b'{"service":"mail","interval":5,"payload":%s}' % (b"[" * 201 + b"]" * 201)
    strict.put("/v1/schedules/a", body).refused(400, "bad_request")
    assert strict.get("/v1/schedules").json["items"] == []


def test_a_service_that_a_schedule_names_cannot_be_deleted(mail):
    body = {"service": "mail", "interval": 3600, "enabled": False}
    mail.put("/v1/schedules/a", body, status=201)
    mail.delete("/v1/services/mail").refused(409, "service_in_use")
    mail.delete("/v1/schedules/a", status=204)
    mail.delete("/v1/services/mail", status=204)

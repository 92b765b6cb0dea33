"""A trial call of a service, its recent errors, the next firings, and long values cut short."""

from web.serving import UNKNOWN_ID, Api


class TestTry:
    def test_it_calls_once_and_stores_no_task(self, api, receiver):
        api.service("mail", receiver.url("/json"), enabled=False)
        answer = api.post("/v1/services/mail/try", {"payload": {"a": 1}}, status=200).json
        assert (answer["event"], answer["result"], answer["error"]) == (
            "finish",
            {"done": True},
            None,
        )
        assert [request.body for request in receiver.requests] == [b'{"a": 1}']
        assert api.get("/v1/tasks").json["items"] == []
        line = api.get("/v1/audit").json["items"][0]
        assert (line["action"], line["target"]) == ("service.try", "mail")
        assert line["detail"] == "finish"

    def test_an_error_is_an_answer_and_is_not_retried(self, api, receiver):
        api.service("mail", receiver.url("/broken"))
        answer = api.post("/v1/services/mail/try", status=200).json
        assert answer["event"] == "retry"
        assert "500" in answer["error"]
        assert len(receiver.requests) == 1

    def test_a_service_that_does_not_answer_in_time(self, api, receiver):
        api.service("mail", receiver.url("/slow"), timeout=0.05)
        answer = api.post("/v1/services/mail/try", status=200).json
        assert answer["event"] == "fail"
        assert "time" in answer["error"]

    def test_a_private_address_stays_forbidden(self, make_api, sqlite_url, receiver):
        with Api(sqlite_url) as lenient:
            lenient.service("mail", receiver.url("/ok"))
        strict = make_api(allow_private_targets=False)
        assert strict.post("/v1/services/mail/try", status=200).json["event"] != "finish"
        assert receiver.requests == []

    def test_an_unknown_service_is_404(self, api):
        api.post("/v1/services/nobody/try").refused(404, "unknown_service")
        api.get("/v1/services/nobody/errors").refused(404, "unknown_service")


def test_the_errors_of_a_service_are_grouped(api, receiver):
    api.service("mail", receiver.url("/broken"), max_attempts=1)
    tasks = [api.submit(delay=0)["id"] for _ in range(3)]
    for task in tasks:
        api.task_in(task, "failed")
    api.submit("mail")
    found = api.get("/v1/services/mail/errors", status=200).json
    assert [one["count"] for one in found["items"]] == [3]
    assert found["items"][0]["task"] in tasks
    assert found["looked_at"] == 4


class TestFirings:
    def test_they_follow_the_rule(self, mail):
        mail.put("/v1/schedules/s", {"service": "mail", "interval": 60}, status=201)
        times = mail.get("/v1/schedules/s/firings?limit=3", status=200).json["items"]
        assert times == sorted(times)
        assert len(times) == 3
        assert times[0] == mail.get("/v1/schedules/s").json["next_at"]

    def test_a_rule_without_a_further_time_has_none(self, mail):
        mail.put("/v1/schedules/s", {"service": "mail", "cron": "0 0 29 2 *"}, status=201)
        assert len(mail.get("/v1/schedules/s/firings?limit=2", status=200).json["items"]) == 2
        mail.get("/v1/schedules/nobody/firings").refused(404, "unknown_schedule")
        mail.get("/v1/schedules/s/firings?limit=101").refused(422, "invalid")


class TestTruncate:
    def test_a_long_value_is_null_and_its_beginning_is_apart(self, mail):
        body = '{"service": "mail", "delay": 60, "payload": "%s"}' % ("ü" * 100)
        task = mail.post("/v1/tasks", body.encode(), status=201).json
        found = mail.get(f"/v1/tasks/{task['id']}?truncate=10", status=200).json
        assert found["payload"] is None
        assert found["truncated"] == {"payload": {"bytes": 202, "start": '"' + "ü" * 4}}
        listed = mail.get("/v1/tasks?truncate=10", status=200).json["items"]
        assert listed == [found]

    def test_a_short_one_stays(self, mail):
        task = mail.submit(payload="short")
        found = mail.get(f"/v1/tasks/{task['id']}?truncate=100", status=200).json
        assert found["payload"] == "short"
        assert "truncated" not in found
        mail.get(f"/v1/tasks/{UNKNOWN_ID}?truncate=1").refused(404, "unknown_task")

    def test_tasks_are_found_by_the_beginning_of_their_due_time(self, mail):
        early, late = mail.submit(delay=60), mail.submit(delay=7200)
        path = f"/v1/tasks?due_after={late['due_at']}"
        assert [one["id"] for one in mail.get(path).json["items"]] == [late["id"]]
        path = f"/v1/tasks?due_after={early['due_at']}&due_before={late['due_at']}"
        assert [one["id"] for one in mail.get(path).json["items"]] == [early["id"]]

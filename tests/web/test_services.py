"""Services over HTTP: put, read, rotate secrets, disable, delete; secrets are never shown."""

from dataclasses import replace

import pytest

from tickwheel.values.service import Backoff
from tickwheel.web.app import ROUTES
from web.serving import MOMENT, SECRET, UNKNOWN_ID, Api

HIDDEN = "********"
READ_ONLY = ("name", "version", "updated_at", "problem")
VALUE = "Bearer very-private-value"
OTHER = "whsec_" + "b3RoZXItc2VjcmV0LW9mLXRoZS10ZXN0cy1ldmVuLW5ld2Vy"
ENDPOINT = "https://93.184.216.34/hook"


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    """An application for requests that are refused and change nothing; no private targets."""
    url = f"sqlite:///{tmp_path_factory.mktemp('strict')}/tasks.db"
    with Api(url, allow_private_targets=False) as api:
        yield api


def stored(api, name="mail"):
    """A service as the node has it, with its secrets."""
    return api.node.services[name]


class TestPut:
    def test_a_new_service_is_201_with_defaults_and_a_changed_one_200(self, either_api):
        path = "/v1/services/mail"
        made = either_api.put(path, {"endpoint": ENDPOINT}, status=201).json
        assert MOMENT.fullmatch(made["updated_at"])
        backoff = {"first": 1.0, "factor": 2.0, "max": 3600.0, "jitter": 0.1, "delays": []}
        assert made == {
            "name": "mail", "protocol": "http", "endpoint": ENDPOINT, "timeout": 30.0,
            "max_attempts": 5, "backoff": backoff,
            "concurrency": 100, "rate": None, "secret": None, "headers": {},
            "feedback_timeout": 3600.0,
            "breaker": {"failures": 10, "pause": 5.0, "max_pause": 60.0, "probes": 1},
            "enabled": True, "confirmed": "finished", "cloudevents": None,
            "version": 1, "updated_at": made["updated_at"], "problem": None,
        }  # fmt: skip
        assert either_api.get(path, status=200).json == made
        changed = either_api.put(path, {"endpoint": ENDPOINT, "timeout": 5}, status=200).json
        assert (changed["timeout"], changed["version"]) == (5.0, 2)
        assert either_api.get(path).json == changed

    def test_all_fields_are_kept(self, either_api):
        wanted = {
            "endpoint": ENDPOINT, "timeout": 1.5, "max_attempts": 9,
            "backoff": {"first": 0.5, "factor": 3.0, "max": 9.0, "jitter": 0.0, "delays": [1.0, 5]},
            "concurrency": 7, "rate": 2.5, "feedback_timeout": 60.0,
            "breaker": {"failures": 3, "pause": 1.0, "max_pause": 8.0, "probes": 2},
            "enabled": False,
        }  # fmt: skip
        either_api.put("/v1/services/mail", wanted, status=201)
        assert wanted.items() <= either_api.get("/v1/services/mail").json.items()

    def test_a_read_can_be_put_back_without_its_read_only_fields(self, api):
        path = "/v1/services/mail"
        api.put(path, {"endpoint": ENDPOINT, "secret": SECRET, "headers": {"x-key": VALUE}})
        before = stored(api)
        read = api.get(path).json
        for name in READ_ONLY:
            del read[name]
        api.put(path, read, status=200)
        assert stored(api).secrets == before.secrets == (SECRET,)
        assert stored(api).headers == before.headers == (("x-key", VALUE),)

    @pytest.mark.parametrize(
        "config",
        [
            {"backoff": [60, 300, 3600]},
            {"backoff": 60},
            {"backoff": Backoff(factor=0.5)},
            {"backoff": Backoff(first=7200)},  # more than its `max`
            {"timeout": None},
            {"rate": None, "breaker": None},
            {"rate": 2.5, "breaker": {"probes": 2}, "secret": SECRET, "headers": {"x-key": VALUE}},
            {"protocol": "redis", "endpoint": "redis://u:hunter2@93.184.216.34/0?stream=orders",
             "confirmed": "running", "cloudevents": "structured"},
        ],
        ids=str,
    )  # fmt: skip
    def test_a_read_that_is_put_back_changes_nothing(self, api, config):
        """Also what only a program that embeds the scheduler can store."""
        api.run(api.scheduler.put_service("mail", {"endpoint": ENDPOINT, **config}))
        before, read = stored(api), api.get("/v1/services/mail", status=200).json
        body = {name: read[name] for name in read if name not in READ_ONLY}
        assert api.put("/v1/services/mail", body, status=200).json["backoff"] == read["backoff"]
        assert stored(api) == replace(before, version=stored(api).version)

    def test_breaker_rate_and_timeout_can_be_null(self, api):
        nulls = {"breaker": None, "rate": None, "timeout": None}
        made = api.put("/v1/services/mail", {"endpoint": ENDPOINT, **nulls}).json
        assert nulls.items() <= made.items()

    def test_a_list_of_delays_is_how_long_retries_wait(self, api):
        api.service(backoff={"delays": [1, 5], "jitter": 0})
        assert [stored(api).backoff.seconds(failures) for failures in (1, 2, 3)] == [1, 5, 5]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"endpoint": None},
            {"endpoint": ""},
            {"endpoint": "x" * 3_000},
            {"protocol": "local"},
            {"protocol": "pigeon"},
            {"timeout": 0},
            {"timeout": -1},
            {"timeout": "5"},
            {"timeout": 1e9},
            {"max_attempts": 0},
            {"concurrency": 0},
            {"concurrency": 1.5},
            {"rate": 0},
            {"rate": -1},
            {"backoff": {"first": -1}},
            {"backoff": {"jitter": 2}},
            {"backoff": {"frist": 1}},
            {"backoff": {"first": 100, "max": 1}},
            {"backoff": {"first": 7200}},
            {"backoff": {"delays": [-1]}},
            {"backoff": {"delays": 60}},
            {"backoff": [1, 2]},
            {"breaker": {"failures": 0}},
            {"breaker": {"pause": 0}},
            {"secret": "hunter2"},
            {"secret": "whsec_!!!!"},
            {"secret": "whsec_c2hvcnQ="},
            {"secret": 5},
            {"secret": [SECRET, 5]},
            {"secret": [SECRET] * 6},
            {"headers": {"x y": "a"}},
            {"headers": {"x": "a\r\nevil: 1"}},
            {"headers": {"x": 5}},
            {"headers": {"webhook-id": "a"}},
            {"headers": {"Content-Length": "5"}},
            {"headers": {"host": "evil"}},
            {"headers": {"x": "a", "X": "b"}},
            {"headers": [["x", "a"]]},
            {"enabled": "yes"},
            {"name": "other"},
            {"version": 1},
            {"secrets": []},
        ],
        ids=lambda wrong: str(wrong)[:50],
    )
    def test_an_invalid_service_is_422(self, strict, wrong):
        answer = strict.put("/v1/services/mail", {"endpoint": ENDPOINT, **wrong})
        assert answer.status == 422
        assert answer.code == "invalid"
        assert "hunter2" not in answer.detail
        assert strict.get("/v1/services").json["items"] == []

    @pytest.mark.parametrize(
        "endpoint",
        ["http://127.0.0.1/", "http://localhost/", "http://10.0.0.1/", "http://[::1]/",
         "http://169.254.169.254/", "http://2130706433/", "ftp://198.51.100.7/", "file:///etc/passwd",
         "http://user:hunter2@198.51.100.7/", "198.51.100.7", "http://", "http://93.184.216.34:0/"],
    )  # fmt: skip
    def test_a_forbidden_target_is_422(self, strict, endpoint):
        answer = strict.put("/v1/services/mail", {"endpoint": endpoint})
        problem = answer.refused(422, "target_refused")
        assert "hunter2" not in problem["detail"]

    @pytest.mark.parametrize("name", ["a b", "é", "x" * 101, "%2F", "a\n", "a,b"])
    def test_an_invalid_name_is_422(self, strict, name):
        body = {"endpoint": ENDPOINT}
        for method, given in (("GET", None), ("PUT", body), ("DELETE", None)):
            strict.request(method, f"/v1/services/{name}", given).refused(422, "invalid")

    @pytest.mark.parametrize("name", ["a", "x" * 100, "A.b_c:d-1", "batch", "..a"])
    def test_a_valid_name_is_accepted(self, api, name):
        api.put(f"/v1/services/{name}", {"endpoint": ENDPOINT}, status=201)
        assert api.get(f"/v1/services/{name}", status=200).json["name"] == name


class TestSecrets:
    def test_secrets_and_values_of_headers_are_not_shown(self, either_api):
        path = "/v1/services/mail"
        body = {
            "endpoint": ENDPOINT,
            "secret": [SECRET, OTHER],
            "headers": {"authorization": VALUE},
        }
        answers = [
            either_api.put(path, body, status=201),
            either_api.get(path),
            either_api.get("/v1/services"),
            either_api.get("/v1/audit"),
            either_api.get("/v1/stats"),
            either_api.get("/metrics"),
        ]
        for answer in answers:
            for secret in (SECRET, OTHER, SECRET[6:], VALUE, "very-private-value"):
                assert secret.encode() not in answer.body
        assert answers[1].json["secret"] == HIDDEN
        assert answers[1].json["headers"] == {"authorization": HIDDEN}

    @pytest.mark.parametrize(
        ("given", "kept"),
        [
            (HIDDEN, (SECRET,)),
            ([HIDDEN], (SECRET,)),
            ([OTHER, HIDDEN], (OTHER, SECRET)),
            (OTHER, (OTHER,)),
            (None, ()),
            ([], ()),
        ],
        ids=str,
    )
    def test_the_placeholder_keeps_a_stored_secret_and_a_list_rotates(self, api, given, kept):
        path = "/v1/services/mail"
        api.put(path, {"endpoint": ENDPOINT, "secret": SECRET}, status=201)
        api.put(path, {"endpoint": ENDPOINT, "secret": given}, status=200)
        assert stored(api).secrets == kept

    def test_a_put_without_a_secret_keeps_it_and_null_removes_it(self, either_api):
        path, kept = "/v1/services/mail", {"secret": SECRET, "headers": {"x-key": VALUE}}
        either_api.put(path, {"endpoint": ENDPOINT, **kept}, status=201)
        either_api.put(path, {"endpoint": ENDPOINT, "rate": 5}, status=200)
        assert stored(either_api).secrets == (SECRET,)
        assert stored(either_api).headers == (("x-key", VALUE),)
        for gone in kept:
            either_api.put(path, {"endpoint": ENDPOINT, gone: None}, status=200)
        assert (stored(either_api).secrets, stored(either_api).headers) == ((), ())

    @pytest.mark.parametrize(
        "config",
        [{}, {"secret": HIDDEN}, {"secret": None}, {"secret": OTHER, "headers": {"x-key": HIDDEN}}],
        ids=str,
    )
    def test_another_origin_gets_nothing_that_is_stored(self, api, receiver, config):
        api.service(endpoint=ENDPOINT, secret=SECRET, headers={"x-key": VALUE})
        before = api.get("/v1/services/mail").json
        endpoint = receiver.url("/ok")
        answer = api.put("/v1/services/mail", {"endpoint": endpoint, **config})
        detail = answer.refused(422, "invalid")["detail"]
        assert "no other origin" in detail
        assert VALUE not in detail
        assert api.get("/v1/services/mail").json == before
        given = {"endpoint": endpoint, "secret": OTHER, "headers": {"x-new": "n"}}
        api.put("/v1/services/mail", given, status=200)
        api.task_in(api.submit(delay=0)["id"], "finished")
        assert receiver.requests[0].header("x-new") == "n"
        assert receiver.requests[0].header("x-key") is None

    @pytest.mark.parametrize(
        "config", [{"secret": HIDDEN}, {"secret": [OTHER, HIDDEN]}, {"headers": {"x": HIDDEN}}]
    )
    def test_a_placeholder_without_a_stored_value_is_422(self, strict, config):
        body = {"endpoint": ENDPOINT, **config}
        strict.put("/v1/services/mail", body).refused(422, "invalid")
        assert strict.get("/v1/services").json["items"] == []

    def test_during_a_rotation_both_secrets_sign(self, api, receiver):
        from standardwebhooks import Webhook

        endpoint = receiver.url("/ok")
        api.service(endpoint=endpoint, secret=SECRET)
        api.service(endpoint=endpoint, secret=[OTHER, HIDDEN])
        task = api.submit(payload={"a": 1}, delay=0)
        api.task_in(task["id"], "finished")
        request = receiver.requests[0]
        headers = {name.lower(): value for name, value in request.headers}
        for secret in (SECRET, OTHER):
            assert Webhook(secret).verify(request.body, headers) == {"a": 1}

    def test_a_header_is_sent_and_its_echo_is_masked(self, api, receiver):
        api.service(
            endpoint=receiver.url("/echo"), secret=SECRET, headers={"authorization": VALUE},
            max_attempts=1,
        )  # fmt: skip
        task = api.submit(delay=0)
        found = api.task_in(task["id"], "failed")
        assert receiver.requests[0].header("authorization") == VALUE
        attempts = api.get(f"/v1/tasks/{task['id']}/attempts")
        for text in (found["error"], attempts.body.decode()):
            assert "500" in text
            assert "very-private-value" not in text
            assert SECRET not in text


class TestList:
    def test_services_are_listed_by_name(self, api):
        for name in ("b", "a", "C"):
            api.service(name)
        page = api.get("/v1/services", status=200).json
        assert [one["name"] for one in page["items"]] == ["C", "a", "b"]
        assert page["next_cursor"] is None

    def test_a_backoff_that_a_request_may_not_have_breaks_no_list(self, api):
        first = 5e9  # a request may have 3.2e9
        odd = Backoff(first=first, max=first)
        api.run(api.scheduler.put_service("odd", endpoint=ENDPOINT, backoff=odd))
        api.service("even")
        page = api.get("/v1/services", status=200).json
        assert [one["name"] for one in page["items"]] == ["even", "odd"]
        assert page["items"][1]["backoff"]["first"] == first

    def test_an_unknown_one_is_404(self, strict):
        strict.get("/v1/services/nobody").refused(404, "unknown_service")
        strict.delete("/v1/services/nobody").refused(404, "unknown_service")


class TestDelete:
    def test_a_deleted_service_is_unknown(self, either_api):
        either_api.service()
        answer = either_api.delete("/v1/services/mail", status=204)
        assert answer.body == b""
        either_api.get("/v1/services/mail").refused(404, "unknown_service")
        either_api.post("/v1/tasks", {"service": "mail"}).refused(422, "unknown_service")

    def test_a_service_with_live_tasks_is_409(self, either_api):
        either_api.service()
        task = either_api.submit()
        either_api.delete("/v1/services/mail").refused(409, "service_in_use")
        either_api.post(f"/v1/tasks/{task['id']}/cancel", status=200)
        either_api.delete("/v1/services/mail", status=204)

    def test_after_a_delete_a_put_makes_a_new_service(self, api):
        api.service(secret=SECRET)
        api.delete("/v1/services/mail", status=204)
        made = api.put("/v1/services/mail", {"endpoint": ENDPOINT}, status=201).json
        assert made["secret"] is None


class TestLive:
    def test_a_disabled_service_holds_its_tasks_until_it_is_enabled(self, api, receiver):
        api.service(endpoint=receiver.url("/ok"), enabled=False)
        task = api.submit(delay=0)
        api.service("other", endpoint=receiver.url("/json"))
        api.task_in(api.submit("other", delay=0)["id"], "finished")
        assert api.get(f"/v1/tasks/{task['id']}").json["state"] == "ready"
        api.service(endpoint=receiver.url("/ok"))
        api.task_in(task["id"], "finished")

    def test_a_change_applies_to_the_next_call(self, api, receiver):
        api.service(endpoint=receiver.url("/first"), max_attempts=1)
        api.task_in(api.submit(delay=0)["id"], "failed")
        api.service(endpoint=receiver.url("/ok"))
        api.task_in(api.submit(delay=0)["id"], "finished")
        assert [one.path for one in receiver.requests] == ["/first", "/ok"]

    def test_a_change_on_one_node_applies_on_another(self, postgres_url, make_api, receiver):
        one, two = make_api(postgres_url), make_api(postgres_url, dispatch=False)
        one.service(endpoint=receiver.url("/ok"), max_attempts=3)
        task = two.submit(delay=0)
        assert task["max_attempts"] == 3
        one.task_in(task["id"], "finished")
        one.service(endpoint=receiver.url("/ok"), max_attempts=4)
        two.until(lambda: two.node.services["mail"].max_attempts == 4)
        one.delete("/v1/services/mail", status=204)
        two.until(lambda: "mail" not in two.node.services)

    def test_410_disables_a_service_and_is_in_the_audit_log(self, api, receiver):
        api.service(endpoint=receiver.url("/gone"))
        task = api.submit(delay=0)
        api.until(lambda: not api.node.services["mail"].enabled)
        api.until(lambda: api.node.services["mail"].version == 2)
        assert api.get("/v1/services/mail").json["enabled"] is False
        assert api.get(f"/v1/tasks/{task['id']}").json["state"] in ("delay", "ready")
        lines = api.get("/v1/audit").json["items"]
        assert (lines[0]["action"], lines[0]["actor"]) == ("service.disable", "tickwheel")


class TestAudit:
    def test_lines_have_actor_and_action_newest_first(self, either_api):
        api = either_api
        api.service()
        api.put("/v1/services/mail", {"endpoint": ENDPOINT}, headers={"x-request-id": "r-1"})
        api.put("/v1/schedules/daily", {"service": "mail", "interval": 9}, status=201)
        api.delete("/v1/schedules/daily", status=204)
        api.post("/v1/tasks/cancel", {"service": "mail"}, status=200)
        api.delete("/v1/services/mail", status=204)
        page = api.get("/v1/audit", status=200).json
        found = [(line["action"], line["target"]) for line in page["items"]]
        assert found == [
            ("service.delete", "mail"), ("task.cancel", "mail"), ("schedule.delete", "daily"),
            ("schedule.put", "daily"), ("service.put", "mail"), ("service.put", "mail"),
        ]  # fmt: skip
        assert page["items"][4]["request"] == "r-1"
        details = [line["detail"] for line in page["items"]]
        assert "interval_ms: 9000 -> none" in details[2]
        assert "interval_ms: none -> 9000" in details[3]
        assert f'-> "{ENDPOINT}"' in details[4]
        assert {line["actor"] for line in page["items"]} == {"anybody"}

    def test_a_cursor_continues(self, either_api):
        for number in range(5):
            either_api.service(f"s{number}")
        found, cursor = [], None
        while True:
            after = f"&cursor={cursor}" if cursor is not None else ""
            page = either_api.get(f"/v1/audit?limit=2{after}", status=200).json
            found += [line["target"] for line in page["items"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
            assert len(found) <= 5
        assert found == ["s4", "s3", "s2", "s1", "s0"]

    @pytest.mark.parametrize(
        "query", ["cursor=x", "cursor=-1", "cursor=99999999999999999999", "limit=0"]
    )
    def test_a_wrong_query_is_422(self, strict, query):
        strict.get(f"/v1/audit?{query}").refused(422, "invalid")


def test_every_route_that_changes_configuration_needs_the_scope_admin():
    changing = [route for route in ROUTES if route.method in ("PUT", "DELETE")]
    changing = [route for route in changing if route.path != "/v1/session"]  # of the caller only
    assert {route.scope for route in changing} == {"admin"}


@pytest.mark.parametrize("good", ["mail", UNKNOWN_ID])
def test_a_line_feed_after_a_name_or_an_id_is_invalid(strict, good):
    query, body = f"{good}%0A", f"{good}\n"
    for path in (
        f"/v1/tasks?service={query}", f"/v1/tasks?cursor={query}",
        f"/v1/backlog?service={query}", f"/v1/backlog?cursor={query}",
    ):  # fmt: skip
        strict.get(path).refused(422, "invalid")
    for method, path, given in (
        ("POST", "/v1/tasks", {"service": body}),
        ("POST", "/v1/tasks/cancel", {"service": body}),
        ("POST", "/v1/backlog/replay", {"service": body}),
        ("PUT", "/v1/schedules/daily", {"service": body, "interval": 60}),
    ):
        answer = strict.request(method, path, given)
        assert "A-Z" in answer.refused(422, "invalid")["detail"]
    [item] = strict.post("/v1/tasks/batch", [{"service": body}], status=200).json["items"]
    assert item["problem"]["code"] == "invalid"
    strict.put(f"/v1/services/{good}\n", {"endpoint": "http://127.0.0.1:9/"}).refused(
        422, "invalid"
    )
    strict.get(f"/v1/tasks/{good}\n").refused(404, "unknown_task")


@pytest.mark.parametrize("name", [".", ".."])
def test_a_name_of_dots_alone_is_422(strict, name):
    for kind, body in (
        ("services", {"endpoint": ENDPOINT}),
        ("schedules", {"service": "mail", "interval": 1}),
    ):
        strict.put(f"/v1/{kind}/{name}", body).refused(422, "invalid")


def test_a_new_service_is_put_without_waiting_for_a_refresh(api, monkeypatch):
    async def reload():
        raise AssertionError("this waits")

    monkeypatch.setattr(api.node.directory, "reload", reload)
    api.put("/v1/services/mail", {"endpoint": ENDPOINT}, status=201)
    api.put("/v1/services/mail", {"endpoint": ENDPOINT}, status=200)


def test_a_service_disabled_by_410_shows_since_when(api, receiver):
    api.service(endpoint=receiver.url("/gone"))
    api.submit(delay=0)
    api.until(lambda: not stored(api).enabled and stored(api).version > 1)
    shown = api.get("/v1/services/mail", status=200).json
    assert shown["enabled"] is False
    assert shown["problem"].startswith("disabled: its endpoint answered 410 Gone at 2")
    config = {"endpoint": receiver.url("/gone"), "enabled": False}
    assert api.put("/v1/services/mail", config, status=200).json["problem"] is None
    refused = api.put("/v1/services/mail", {**config, "gone_at_ms": 1})
    refused.refused(422, "invalid")


class TestVersions:
    """An ETag is a service's version; If-Match prevents lost updates."""

    PATH = "/v1/services/mail"

    def test_a_read_and_a_put_return_an_etag(self, api):
        made = api.put(self.PATH, {"endpoint": ENDPOINT}, status=201)
        assert made.headers["etag"] == f'"{made.json["version"]}"'
        assert api.get(self.PATH).headers["etag"] == made.headers["etag"]
        changed = api.put(self.PATH, {"endpoint": ENDPOINT}, status=200)
        assert changed.headers["etag"] == api.get(self.PATH).headers["etag"]
        assert changed.headers["etag"] != made.headers["etag"]

    def test_a_change_of_an_old_version_is_412_and_changes_nothing(self, either_api):
        api = either_api
        read = api.put(self.PATH, {"endpoint": ENDPOINT}).headers["etag"]
        off = {"endpoint": ENDPOINT, "enabled": False}
        api.put(self.PATH, off, headers={"if-match": read}, status=200)
        late = api.put(self.PATH, {"endpoint": ENDPOINT, "rate": 5}, headers={"if-match": read})
        assert "'mail'" in late.refused(412, "service_changed")["detail"]
        found = api.get(self.PATH).json
        assert (found["enabled"], found["rate"]) == (False, None)

    def test_of_two_concurrent_changes_one_wins(self, either_api):
        read = either_api.put(self.PATH, {"endpoint": ENDPOINT}).headers["etag"]
        options = {"headers": {"if-match": read}}
        answers = either_api.together(*(
            ("PUT", self.PATH, {"endpoint": ENDPOINT, "rate": rate}, options)
            for rate in range(1, 6)
        ))  # fmt: skip
        assert sorted(answer.status for answer in answers) == [200, 412, 412, 412, 412]

    def test_if_match_takes_a_list_a_star_and_a_weak_etag(self, api):
        for tags in ('"77", {}', "*", "W/{}"):
            read = api.put(self.PATH, {"endpoint": ENDPOINT}).headers["etag"]
            headers = {"if-match": tags.format(read)}
            api.put(self.PATH, {"endpoint": ENDPOINT}, headers=headers, status=200)

    @pytest.mark.parametrize("tag", ['"1"', '"0"', "*", '""'])
    def test_if_match_fails_for_a_missing_service(self, api, tag):
        answer = api.put(self.PATH, {"endpoint": ENDPOINT}, headers={"if-match": tag})
        answer.refused(412, "service_changed")
        api.get(self.PATH, status=404)

    def test_if_none_match_allows_only_a_new_service(self, api):
        only_new = {"if-none-match": "*"}
        api.put(self.PATH, {"endpoint": ENDPOINT}, headers=only_new, status=201)
        answer = api.put(self.PATH, {"endpoint": ENDPOINT}, headers=only_new)
        answer.refused(412, "service_changed")

    @pytest.mark.parametrize(
        "headers",
        [{"if-match": "1"}, {"if-match": ""}, {"if-match": '"1" "2"'}, {"if-none-match": '"1"'},
         {"if-match": '"1"', "if-none-match": "*"}],
    )  # fmt: skip
    def test_an_invalid_etag_is_400(self, strict, headers):
        answer = strict.put(self.PATH, {"endpoint": ENDPOINT}, headers=headers)
        answer.refused(400, "bad_request")

    def test_names_in_messages_have_no_namespace(self, api):
        token = api.token("admin", namespace="acme")
        api.service(token=token)
        late = api.put(
            self.PATH, {"endpoint": ENDPOINT}, token=token, headers={"if-none-match": "*"}
        )
        assert "acme" not in late.refused(412, "service_changed")["detail"]
        api.put("/v1/schedules/s", {"service": "mail", "interval": 60}, token=token)
        reason = api.delete(self.PATH, token=token).refused(409, "service_in_use")["detail"]
        assert "'s'" in reason
        assert "acme" not in reason


class TestUnusableHere:
    """A wrong configuration of this node must not break the service or its tasks."""

    @pytest.fixture
    def elsewhere(self, sqlite_url):
        """A store with a service on loopback, put by a node that may call private targets."""
        with Api(sqlite_url, secret_key="a key of 16 or more") as api:
            api.service(secret=SECRET, max_attempts=7)
        return sqlite_url

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"secret_key": "another key of 16 or more"}, "TICKWHEEL_SECRET_KEY"),
            (
                {"secret_key": "a key of 16 or more", "allow_private_targets": False},
                "--allow-private-targets",
            ),
        ],
    )
    def test_its_tasks_are_accepted_and_wait_and_it_shows_why(self, elsewhere, options, reason):
        with Api(elsewhere, **options) as api:
            shown = api.get("/v1/services/mail", status=200).json
            assert reason in shown["problem"]
            assert shown["secret"] == "********"
            assert api.get("/v1/services").json["items"] == [shown]
            task = api.submit(delay=0)
            assert task["max_attempts"] == 7
            batch = api.post("/v1/tasks/batch", [{"service": "mail"}], status=200).json
            assert batch["stored"] == 1
            api.put("/v1/schedules/s", {"service": "mail", "interval": 3600}, status=201)
            assert not api.node.horizon.waiting("mail")  # another node may run them
            found = api.get(f"/v1/tasks/{task['id']}").json
            assert (found["state"], found["attempt"], found["failures"]) == ("ready", 0, 0)

    def test_it_can_be_paused_and_resumed_and_not_changed(self, elsewhere):
        options = {"secret_key": "a key of 16 or more", "allow_private_targets": False}
        with Api(elsewhere, **options) as api:
            path = "/v1/services/mail"
            body = {name: value for name, value in api.get(path).json.items()
                    if name not in READ_ONLY}  # fmt: skip
            for enabled in (False, True):
                shown = api.put(path, body | {"enabled": enabled}, status=200).json
                assert shown["enabled"] is enabled
                assert "--allow-private-targets" in shown["problem"]
            change = {"endpoint": "http://127.0.0.1:10/", "secret": None}
            for more in ({"rate": 5}, {"enabled": False, "rate": 5}, change):
                api.put(path, body | more).refused(422, "target_refused")
            assert api.node.directory.get("mail").secrets == (SECRET,)

    def test_a_put_that_keeps_an_undecryptable_secret_is_refused(self, elsewhere):
        with Api(elsewhere, secret_key="another key of 16 or more") as api:
            for config in ({"secret": "********"}, {}):
                answer = api.put("/v1/services/mail", {"endpoint": ENDPOINT, **config})
                assert "TICKWHEEL_SECRET_KEY" in answer.refused(422, "invalid")["detail"]
            api.put("/v1/services/mail", {"endpoint": ENDPOINT, "secret": SECRET}, status=200)
            assert api.get("/v1/services/mail").json["problem"] is None

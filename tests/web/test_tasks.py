"""Tasks over HTTP: read, list, cancel, reschedule, feedback; and what holds for all routes."""

import re
from datetime import datetime

import pytest

from contracts.stores import claim, ending
from receivers import answering
from tickwheel.values.task import Event
from web.serving import UNKNOWN_ID, nested


def moment(text):
    return datetime.fromisoformat(text)


def tried(api, times, **fields):
    """Store a task of a disabled service with an execution log; return its id."""
    api.service("tried", enabled=False)
    task = api.run(api.scheduler.submit("tried", max_attempts=10_000))
    store = api.node.store

    async def fail():
        [running] = await claim(store, [task], api.node.coordinator.owned())
        assert await store.record([ending(running, Event.RETRY, **fields)]) == [True]

    api.until(lambda: task.shard in api.node.coordinator.owned())
    for _ in range(times):
        api.run(fail())
    return task.id


class TestGet:
    @pytest.mark.parametrize(
        "task_id", [UNKNOWN_ID, "x", UNKNOWN_ID[:-1], "G" * 32, "%00", "..", "a" * 5_000, "é"]
    )
    @pytest.mark.parametrize(
        ("method", "what", "body"),
        [
            ("GET", "", None),
            ("GET", "/attempts", None),
            ("POST", "/cancel", None),
            ("POST", "/reschedule", {"delay": 1}),
            ("POST", "/feedback", {"outcome": "finished", "attempt": 1}),
        ],
        ids=["get", "attempts", "cancel", "reschedule", "feedback"],
    )
    def test_an_unknown_id_is_404(self, strict, method, what, body, task_id):
        answer = strict.request(method, f"/v1/tasks/{task_id}{what}", body)
        answer.refused(404, "unknown_task")

    def test_the_attempts_have_each_event(self, either_api, receiver):
        either_api.service(
            endpoint=receiver.url("/broken"), max_attempts=2, backoff={"first": 0, "max": 0}
        )
        task = either_api.submit(delay=0)
        found = either_api.task_in(task["id"], "failed")
        assert (found["attempt"], found["failures"]) == (2, 2)
        assert "500" in found["error"]
        page = either_api.get(f"/v1/tasks/{task['id']}/attempts", status=200).json
        assert page["next_cursor"] is None
        assert [(one["attempt"], one["event"]) for one in page["items"]] == [
            (1, "retry"),
            (2, "fail"),
        ]
        for one in page["items"]:
            assert [*one] == [
                "attempt",
                "event",
                "node",
                "epoch",
                "started_at",
                "ended_at",
                "error",
                "delivered_to",
            ]
            assert one["delivered_to"] is None
            assert moment(one["started_at"]) <= moment(one["ended_at"])

    def test_a_task_without_attempts_has_an_empty_list(self, mail):
        task = mail.submit()
        found = mail.get(f"/v1/tasks/{task['id']}/attempts", status=200).json
        assert found == {"items": [], "next_cursor": None}

    def test_attempts_have_pages(self, either_api):
        task_id = tried(either_api, 7)
        path = f"/v1/tasks/{task_id}/attempts"
        found, cursor = [], ""
        for expected in (3, 3, 1):
            page = either_api.get(f"{path}?limit=3{cursor}", status=200).json
            assert len(page["items"]) == expected
            found += [one["attempt"] for one in page["items"]]
            cursor = f"&cursor={page['next_cursor']}"
        assert (found, page["next_cursor"]) == ([1, 2, 3, 4, 5, 6, 7], None)
        behind = either_api.get(f"{path}?cursor=7", status=200).json
        assert behind == {"items": [], "next_cursor": None}
        assert len(either_api.run(either_api.scheduler.attempts(task_id))) == 7

    def test_a_page_of_attempts_with_long_errors_is_bounded(self, either_api):
        error = "\x01" * 16_000  # six bytes each as JSON
        task_id = tried(either_api, 80, error=error)
        found, cursor, pages = [], 0, 0
        while cursor is not None:
            path = f"/v1/tasks/{task_id}/attempts?limit=1000&cursor={cursor}"
            answer = either_api.get(path, status=200)
            assert len(answer.body) < 4 << 20
            found += answer.json["items"]
            cursor, pages = answer.json["next_cursor"], pages + 1
        assert [one["attempt"] for one in found] == list(range(1, 81))
        assert {one["error"] for one in found} == {error}
        assert pages == 5
        rows = either_api.run(either_api.scheduler.attempts(task_id))
        assert [row.attempt for row in rows] == list(range(1, 81))

    @pytest.mark.parametrize(
        "query", ["limit=0", "limit=1001", "cursor=x", "cursor=-1", "cursor=2147483648", "after=1"]
    )
    def test_an_invalid_query_of_attempts_is_422(self, mail, query):
        path = f"/v1/tasks/{mail.submit()['id']}/attempts?{query}"
        mail.get(path).refused(422, "invalid")

    def test_the_answer_of_the_callee_is_the_result_byte_for_byte(self, either_api, receiver):
        text = rb'{"n" : 12345678901234567890123, "a":1,"a":2, "e":"\u00e9"}'
        receiver.on("/result", answering(200, text, content_type="application/json"))
        either_api.service(endpoint=receiver.url("/result"))
        task = either_api.submit(delay=0)
        either_api.task_in(task["id"], "finished")
        assert text in either_api.get(f"/v1/tasks/{task['id']}").body


class TestList:
    def test_tasks_are_newest_first_and_a_cursor_continues(self, either_api):
        either_api.service()
        ids = [either_api.submit()["id"] for _ in range(7)]
        found, cursor, pages = [], "", 0
        while cursor is not None:
            after = f"&cursor={cursor}" if cursor else ""
            page = either_api.get(f"/v1/tasks?limit=3{after}", status=200).json
            assert len(page["items"]) <= 3
            found += [one["id"] for one in page["items"]]
            cursor, pages = page["next_cursor"], pages + 1
            assert pages <= 4
        assert sorted(found) == sorted(ids)
        assert found == sorted(found, reverse=True)

    def test_filters_combine(self, either_api):
        either_api.service("mail")
        either_api.service("print")
        one = either_api.submit("mail", key="a", due_at="2126-01-01T00:00:00Z")["id"]
        two = either_api.submit("mail", key="b", due_at="2127-01-01T00:00:00Z")["id"]
        three = either_api.submit("print", key="a", due_at="2127-01-01T00:00:00Z")["id"]
        either_api.post(f"/v1/tasks/{three}/cancel", status=200)

        def ids(query):
            items = either_api.get(f"/v1/tasks?{query}", status=200).json["items"]
            return {item["id"] for item in items}

        assert ids("") == {one, two, three}
        assert ids("service=mail") == {one, two}
        assert ids("key=a") == {one, three}
        assert ids("key=a&service=mail") == {one}
        assert ids("state=cancelled") == {three}
        assert ids("state=delay&due_before=2126-06-01T00:00:00Z") == {one}
        assert ids("due_before=2126-06-01T02:00:00%2B02:00&service=mail") == {one}
        assert ids("state=running") == set()
        assert ids("service=nobody") == set()

    @pytest.mark.parametrize(
        "query",
        ["limit=0", "limit=1001", "limit=-1", "limit=x", "limit=1.5", "limit=", "cursor=x",
         "cursor=", f"cursor={'0' * 31}", f"cursor={'G' * 32}", "state=odd", "state=", "service=",
         "service=a%2Fb", "key=", "due_before=x", "due_before=2126-01-01T00:00:00",
         "due_before=inf", "due_before=1e99", "odd=1", "Limit=5", "limit=5&odd"],
    )  # fmt: skip
    def test_a_wrong_query_is_422_and_names_the_parameter(self, strict, query):
        problem = strict.get(f"/v1/tasks?{query}").refused(422, "invalid")
        assert re.search(re.split("[=&]", query)[0] + "|odd", problem["detail"])

    @pytest.mark.parametrize("query", ["key=%ff", "%ff=1", "&".join(["limit=1"] * 60)])
    def test_a_query_that_cannot_be_read_is_400(self, strict, query):
        strict.get(f"/v1/tasks?{query}").refused(400, "bad_request")

    def test_a_route_without_a_query_refuses_parameters(self, strict):
        strict.get("/v1/services?limit=5").refused(422, "invalid")


class TestCancel:
    def test_a_cancel_wins_once(self, either_api):
        either_api.service()
        task = either_api.submit()
        path = f"/v1/tasks/{task['id']}/cancel"
        assert either_api.post(path, status=200).json == {"won": True, "state": "cancelled"}
        assert either_api.post(path, status=200).json == {"won": False, "state": "cancelled"}
        assert either_api.get(f"/v1/tasks/{task['id']}").json["state"] == "cancelled"

    def test_a_cancel_accepts_an_empty_body(self, mail):
        task = mail.submit()
        mail.post(f"/v1/tasks/{task['id']}/cancel", {}, status=200)

    def test_of_concurrent_cancels_one_wins(self, either_api):
        either_api.service()
        path = f"/v1/tasks/{either_api.submit()['id']}/cancel"
        answers = either_api.together(*[("POST", path, None, {})] * 20)
        assert sorted(one.json["won"] for one in answers) == [False] * 19 + [True]

    def test_a_running_task_is_not_cancelled(self, api, receiver):
        api.service(endpoint=receiver.url("/slow"))
        task = api.submit(delay=0)
        api.task_in(task["id"], "running")
        answer = api.post(f"/v1/tasks/{task['id']}/cancel", status=200)
        assert answer.json == {"won": False, "state": "running"}
        receiver.release()
        api.task_in(task["id"], "finished")

    @pytest.mark.parametrize(
        ("where", "count"),
        [
            ({"key": "a"}, 2),
            ({"service": "mail"}, 2),
            ({"service": "mail", "key": "a"}, 1),
            ({"service": "mail", "due_before": "2126-06-01T00:00:00Z"}, 1),
            ({"service": "mail", "state": "ready"}, 0),
            ({"service": "nobody"}, 0),
        ],
        ids=str,
    )
    def test_a_bulk_cancel_takes_a_key_or_a_filter(self, mail, where, count):
        mail.service("print")
        mail.submit("mail", key="a", due_at="2126-01-01T00:00:00Z")
        mail.submit("mail", key="b", due_at="2127-01-01T00:00:00Z")
        mail.submit("print", key="a", due_at="2127-01-01T00:00:00Z")
        assert mail.post("/v1/tasks/cancel", where, status=200).json == {"cancelled": count}
        assert len(mail.get("/v1/tasks?state=cancelled").json["items"]) == count

    @pytest.mark.parametrize("where", [{}, {"state": "delay"}, {"key": ""}, {"id": "a"}], ids=str)
    def test_a_cancel_of_everything_is_refused(self, strict, where):
        strict.post("/v1/tasks/cancel", where).refused(422, "invalid")
        assert strict.untouched()


class TestReschedule:
    def test_a_task_is_moved(self, either_api):
        either_api.service()
        task = either_api.submit()
        path = f"/v1/tasks/{task['id']}"
        body = {"due_at": "2126-01-01T00:00:00Z"}
        answer = either_api.post(f"{path}/reschedule", body, status=200)
        assert answer.json == {"won": True, "state": "delay"}
        assert either_api.get(path).json["due_at"] == "2126-01-01T00:00:00.000Z"

    def test_a_task_moved_to_now_runs(self, api, receiver):
        api.service(endpoint=receiver.url("/ok"))
        task = api.submit()
        api.post(f"/v1/tasks/{task['id']}/reschedule", {"delay": 0}, status=200)
        api.task_in(task["id"], "finished")

    def test_a_final_task_is_not_moved(self, mail):
        task = mail.submit()
        mail.post(f"/v1/tasks/{task['id']}/cancel", status=200)
        answer = mail.post(f"/v1/tasks/{task['id']}/reschedule", {"delay": 0}, status=200)
        assert answer.json == {"won": False, "state": "cancelled"}

    @pytest.mark.parametrize(
        "body",
        [{}, {"delay": 1, "due_at": "2126-01-01T00:00:00Z"}, {"delay": -1}, {"delay": None},
         {"due_at": "x"}, {"at": 1}],
        ids=str,
    )  # fmt: skip
    def test_a_reschedule_takes_exactly_one_time(self, strict, body):
        strict.post(f"/v1/tasks/{strict.task['id']}/reschedule", body).refused(422, "invalid")


class TestFeedback:
    @pytest.fixture
    def accepted(self, either_api, receiver):
        """An application on either store, with a task that its callee has accepted."""
        either_api.service(endpoint=receiver.url("/accepted"), max_attempts=3)
        task = either_api.submit(delay=0)
        either_api.until(lambda: receiver.requests and not either_api.node.dispatch.running)
        either_api.run(either_api.node.feedback.drain())
        return either_api, either_api.task_in(task["id"], "running")

    def test_finished_stores_the_result_byte_for_byte(self, accepted):
        api, task = accepted
        result = rb'{"n" : 1.50, "n":"\u0041"}'
        body = b'{"outcome":"finished","attempt":1,"result":' + result + b"}"
        answer = api.post(f"/v1/tasks/{task['id']}/feedback", body, status=200)
        assert answer.json == {"won": True, "state": "finished"}
        found = api.get(f"/v1/tasks/{task['id']}")
        assert found.json["state"] == "finished"
        assert result in found.body

    def test_a_result_that_is_nested_too_deeply_is_400_and_changes_nothing(self, accepted):
        api, task = accepted
        path = f"/v1/tasks/{task['id']}/feedback"
        body = b'{"outcome":"finished","attempt":1,"result":%s}'
        assert "200" in api.post(path, body % nested(201)).refused(400, "bad_request")["detail"]
        assert api.get(f"/v1/tasks/{task['id']}").json["state"] == "running"
        api.post(path, body % nested(200), status=200)

    def test_failed_is_tried_again(self, accepted):
        api, task = accepted
        body = {"outcome": "failed", "attempt": 1, "error": "no paper\0"}
        answer = api.post(f"/v1/tasks/{task['id']}/feedback", body, status=200)
        assert answer.json == {"won": True, "state": "delay"}
        found = api.get(f"/v1/tasks/{task['id']}").json
        assert found["failures"] == 1
        assert "no paper" in found["error"]

    def test_failed_without_retry_is_final(self, accepted):
        api, task = accepted
        body = {"outcome": "failed", "attempt": 1, "retry": False}
        answer = api.post(f"/v1/tasks/{task['id']}/feedback", body, status=200)
        assert answer.json == {"won": True, "state": "failed"}
        assert api.get(f"/v1/tasks/{task['id']}").json["error"]

    def test_progress_leaves_it_running(self, accepted):
        api, task = accepted
        path = f"/v1/tasks/{task['id']}/feedback"
        for _ in range(2):
            answer = api.post(path, {"outcome": "progress", "attempt": 1}, status=200)
            assert answer.json == {"won": True, "state": "running"}
        api.post(path, {"outcome": "finished", "attempt": 1, "epoch": task["epoch"]}, status=200)

    def test_of_another_attempt_or_epoch_it_is_409_and_changes_nothing(self, accepted):
        api, task = accepted
        path = f"/v1/tasks/{task['id']}"
        wrong = [
            {"attempt": 2},
            {"attempt": 1, "epoch": task["epoch"] + 1},
            {"attempt": 1, "epoch": task["epoch"] + 2**40},
        ]
        for one in wrong:
            answer = api.post(f"{path}/feedback", {"outcome": "finished", **one})
            answer.refused(409, "attempt_over")
        assert api.get(path).json == task

    def test_a_second_feedback_is_409(self, accepted):
        api, task = accepted
        path = f"/v1/tasks/{task['id']}/feedback"
        api.post(path, {"outcome": "finished", "attempt": 1, "result": 1}, status=200)
        for outcome in ("finished", "failed", "progress"):
            body = {"outcome": outcome, "attempt": 1, "result": 2}
            api.post(path, body).refused(409, "attempt_over")
        assert api.get(f"/v1/tasks/{task['id']}").json["result"] == 1

    def test_of_concurrent_feedbacks_one_wins(self, accepted):
        api, task = accepted
        path = f"/v1/tasks/{task['id']}/feedback"
        requests = [
            ("POST", path, {"outcome": "finished", "attempt": 1, "result": n}, {})
            for n in range(10)
        ]
        answers = api.together(*requests)
        assert sorted(one.status for one in answers) == [200] + [409] * 9

    def test_feedback_for_a_task_that_is_not_running_is_409(self, mail):
        task = mail.submit()
        body = {"outcome": "finished", "attempt": 1}
        mail.post(f"/v1/tasks/{task['id']}/feedback", body).refused(409, "attempt_over")

    @pytest.mark.parametrize(
        "body",
        [{}, {"outcome": "finished"}, {"attempt": 1}, {"outcome": "done", "attempt": 1},
         {"outcome": "finished", "attempt": 0}, {"outcome": "finished", "attempt": "1"},
         {"outcome": "finished", "attempt": 2**40}, {"outcome": "failed", "attempt": 1, "error": 5},
         {"outcome": "failed", "attempt": 1, "error": "x" * 20_000},
         {"outcome": "finished", "attempt": 1, "epoch": -1},
         {"outcome": "failed", "attempt": 1, "retry": "no"}],
        ids=lambda body: str(body)[:60],
    )  # fmt: skip
    def test_an_invalid_feedback_is_422(self, strict, body):
        strict.post(f"/v1/tasks/{strict.task['id']}/feedback", body).refused(422, "invalid")


class TestRoutes:
    @pytest.mark.parametrize("path", ["/v1", "/v2/tasks", "/v1/task", "/v1/tasks/a/b/c", "/é"])
    def test_an_unknown_path_is_404(self, strict, path):
        strict.get(path).refused(404, "not_found")

    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [
            ("DELETE", "/v1/tasks", "GET, HEAD, POST"),
            ("PATCH", "/v1/services/mail", "DELETE, GET, HEAD, PUT"),
            ("GET", "/v1/tasks/x/cancel", "POST"),
            ("POST", "/healthz", "GET, HEAD"),
            ("BREW", "/v1/wheel", "GET, HEAD"),
        ],
    )
    def test_another_method_is_405_and_names_the_allowed_ones(self, strict, method, path, allowed):
        answer = strict.request(method, path)
        answer.refused(405, "method_not_allowed")
        assert answer.headers["allow"] == allowed

    def test_a_path_without_v1_is_told_where_the_api_is(self, api):
        for method, path in (("POST", "/tasks"), ("PUT", "/services/mail")):
            assert api.request(method, path).json["detail"].endswith("; the API is below /v1")
        assert "below" not in api.request("GET", "/v1/nothing").json["detail"]

    def test_a_valid_request_id_is_kept_and_another_is_replaced(self, api):
        def echoed(given):
            return api.get("/healthz", headers={"x-request-id": given}).headers["x-request-id"]

        assert echoed("abc-1.2:3_4") == "abc-1.2:3_4"
        for odd in ("", "a b", "x" * 101, "a\r\nset-cookie: a=b", "é", '"><script>'):
            assert re.fullmatch(r"[0-9a-f]+-[0-9a-f]+", echoed(odd))

    def test_request_ids_differ(self, api):
        ids = {api.get("/healthz").headers["x-request-id"] for _ in range(100)}
        assert len(ids) == 100

    def test_nodes_shards_wheel_and_stats_are_shown(self, either_api):
        api = either_api
        api.service()
        api.until(lambda: len(api.node.coordinator.owned()) == 64)
        api.submit(delay=30)
        api.until(lambda: len(api.node.horizon.entries) == 1)
        assert api.get("/healthz", status=200).json == {"status": "ok"}
        api.until(lambda: not api.node.health.unready())
        assert api.get("/readyz", status=200).json["status"] == "ready"
        nodes = api.get("/v1/nodes", status=200).json["items"]
        assert [one["this"] for one in nodes] == [True]
        shards = api.get("/v1/shards", status=200).json["items"]
        assert [one["shard"] for one in shards] == [*range(64)]
        assert {one["owner"] for one in shards} == {nodes[0]["name"]}
        wheel = api.get("/v1/wheel", status=200).json
        assert wheel["held"] == sum(sum(level["counts"]) for level in wheel["levels"]) == 1
        stats = api.get("/v1/stats", status=200).json
        assert (stats["submitted"], stats["held"], stats["owned"]) == (1, 1, 64)
        assert stats["services"]["mail"]["breaker"] == "closed"
        assert api.get("/", status=200).media == "text/html"

    def test_the_only_node_cannot_be_drained(self, either_api, store_url):
        api = either_api
        api.until(lambda: len(api.node.coordinator.owned()) == 64)
        problem = api.post(f"/v1/nodes/{api.node.name}/drain").refused(409, "cannot_drain")
        alone = store_url.startswith("sqlite")
        why = "one node owns every shard" if alone else "no other active node"
        assert why in problem["detail"]
        if not alone:
            api.post("/v1/nodes/nobody/drain").refused(404, "unknown_node")
            api.delete("/v1/nodes/nobody/drain").refused(404, "unknown_node")
            api.delete(f"/v1/nodes/{api.node.name}/drain", status=204)
        for token in (api.token("read", "submit"), api.token("admin", namespace="shop")):
            api.post(f"/v1/nodes/{api.node.name}/drain", token=token).refused(403, "forbidden")

    def test_readyz_is_503_while_it_stops(self, api):
        api.app.stopping = True
        assert api.get("/readyz", status=503).json["status"] == "stopping"
        api.get("/healthz", status=200)

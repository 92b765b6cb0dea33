"""Access control: tokens, scopes, namespaces, rates, and requests without a token."""

import hmac
import signal
from unittest.mock import Mock

import pytest

from receivers import answering
from tickwheel.web import schemas
from tickwheel.web.app import ROUTES
from web.serving import (
    SECRET,
    UNKNOWN_ID,
    Api,
    Served,
    create_token,
    made_token,
    on_store,
    revoked,
    stored,
    wait_until,
)

GUARDED = [route for route in ROUTES if route.scope is not None]
OPEN = [route for route in ROUTES if route.scope is None]
SCOPES = ("submit", "read", "admin")
BODIES = {
    "/v1/tokens": {"name": "new", "scopes": ["read"]},
    "/v1/tasks": {"service": "mail"},
    "/v1/tasks/batch": [],
    "/v1/tasks/cancel": {"service": "mail"},
    "/v1/tasks/{id}/reschedule": {"delay": 60},
    "/v1/tasks/{id}/feedback": {"outcome": "finished", "attempt": 1},
    "/v1/services/{name}": {"endpoint": "http://127.0.0.1:9/"},
    "/v1/schedules/{name}": {"service": "mail", "interval": 60},
}


def named(routes):
    return [pytest.param(route, id=f"{route.method} {route.path}") for route in routes]


def ask(api, route, *, task_id=UNKNOWN_ID, name="mail", **options):
    """Make a valid request of a route."""
    path = route.path.replace("{id}", task_id).replace("{name}", name).replace("{token}", "0" * 12)
    body = BODIES.get(route.path) if route.method in ("POST", "PUT") else None
    return api.request(route.method, path, body, **options)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """An application with a token for each scope, and some invalid ones."""
    with Api(f"sqlite:///{tmp_path_factory.mktemp('guarded')}/tasks.db") as api:
        api.tokens = {scope: api.token(scope) for scope in SCOPES}
        api.service(token=api.tokens["admin"], enabled=False)
        yield api


class TestTokens:
    def test_without_a_token_it_is_401(self, guarded):
        for route in GUARDED:
            answer = ask(guarded, route)
            assert (answer.status, answer.code) == (401, "unauthorized"), route.path
            assert answer.headers["www-authenticate"].startswith("Bearer")

    def test_public_routes_need_no_token(self, guarded):
        signing = [route for route in OPEN if route.path == "/v1/session"]
        assert {ask(guarded, route).status for route in OPEN if route not in signing} == {200}

    def test_only_health_openapi_and_signing_in_and_out_are_public(self):
        assert {(route.method, route.path) for route in OPEN} == {
            ("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/openapi.json"),
            ("POST", "/v1/session"), ("DELETE", "/v1/session"),
        }  # fmt: skip

    @pytest.mark.parametrize("scope", SCOPES)
    def test_a_scope_allows_its_own_routes_and_admin_all(self, guarded, scope):
        for route in GUARDED:
            answer = ask(guarded, route, token=guarded.tokens[scope], name="unknown")
            if scope in (route.scope, "admin") or route.scope == "":
                assert answer.status not in (401, 403), (route.path, answer)
            else:
                assert repr(route.scope) in answer.refused(403, "forbidden")["detail"], route.path

    def test_every_read_under_v1_needs_read_or_admin_and_tasks_are_changed_by_submit(self):
        for route in GUARDED:
            if route.path == "/v1/session":
                assert route.scope == ""
            elif route.method == "GET":
                admins = ("/v1/audit", "/v1/tokens")
                assert route.scope == ("admin" if route.path in admins else "read")
            elif route.path.startswith(("/v1/tasks", "/v1/backlog")):
                assert route.scope == "submit"
            else:
                assert route.scope == "admin"

    @pytest.mark.parametrize(
        "change",
        [
            lambda text: f"Bearer {text}x",
            lambda text: f"Bearer {text[:-1]}",
            lambda text: f"Bearer {text[:-1]}{'A' if text[-1] != 'A' else 'B'}",
            lambda text: f"Bearer {text.upper()}",
            lambda text: f"Bearer tw_{'0' * 12}_{text[16:]}",
            lambda text: f"Basic {text}",
            lambda text: text,
            lambda text: "Bearer",
            lambda text: "",
            lambda text: f"Bearer {text} {text}",
            lambda text: f"Bearer {'x' * 10_000}",
            lambda text: "Bearer \xff\xfe",
            lambda text: f"Bearer {text}\0",
        ],
        ids=range(13),
    )
    def test_a_wrong_token_is_401_and_is_not_shown(self, guarded, change):
        text = guarded.tokens["admin"]
        answer = guarded.get("/v1/tasks", headers={"authorization": change(text)})
        answer.refused(401, "unauthorized")
        assert text[16:-1].encode() not in answer.body

    def test_digests_are_compared_in_constant_time(self, guarded, monkeypatch):
        compare = Mock(wraps=hmac.compare_digest)
        monkeypatch.setattr(hmac, "compare_digest", compare)
        token = guarded.tokens["read"]
        guarded.get("/v1/tasks", token=token, status=200)
        given, known = compare.call_args.args
        assert given == known
        guarded.get("/v1/tasks", token=f"{token[:16]}{'x' * 43}").refused(401, "unauthorized")
        assert compare.call_args.args[0] != known

    def test_a_token_that_was_just_made_elsewhere_is_accepted(self, make_api):
        api = make_api()
        api.token("admin")
        api.run(api.node._steps["directory"].stop())  # in time it would find the token by polling
        token, text = made_token("read")
        api.run(stored(api.node.store, token))
        api.get("/v1/tasks", token=text, status=200)

    @pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER  {} "])
    def test_the_scheme_is_case_insensitive(self, guarded, form):
        header = form.format(guarded.tokens["read"])
        guarded.get("/v1/tasks", headers={"authorization": header}, status=200)

    def test_an_expired_token_is_401(self, make_api):
        api = make_api()
        now = int(api.node.store.now_ms())
        good = api.token("read", expires_at_ms=now + 3_600_000)
        old = api.token("read", expires_at_ms=now)
        api.get("/v1/tasks", token=good, status=200)
        answer = api.get("/v1/tasks", token=old)
        assert "expired" in answer.refused(401, "unauthorized")["detail"]

    def test_a_revoked_token_is_401(self, make_api):
        api = make_api()
        api.token("admin")  # while any token exists, one is needed
        token = api.token("read")
        api.get("/v1/tasks", token=token, status=200)
        api.revoke(token)
        api.get("/v1/tasks", token=token).refused(401, "unauthorized")

    def test_after_the_first_token_is_made_requests_need_one(self, api):
        api.get("/v1/tasks", status=200)
        api.token("read")
        api.get("/v1/tasks").refused(401, "unauthorized")

    def test_revoking_the_last_token_does_not_open_the_api(self, api):
        token = api.token("read")
        api.get("/v1/tasks", token=token, status=200)  # and requests without one are refused
        api.revoke(token)
        api.get("/v1/tasks").refused(401, "unauthorized")

    def test_a_wrong_token_is_refused_even_if_none_is_needed(self, api):
        token = f"tw_{'0' * 12}_{'x' * 43}"
        api.get("/v1/tasks", token=token).refused(401, "unauthorized")

    def test_the_audit_log_names_the_token_and_not_its_secret(self, make_api):
        api = make_api()
        token = api.token("admin", name="operator")
        api.service(token=token)
        answer = api.get("/v1/audit", token=token, status=200)
        line = answer.json["items"][0]
        assert line["actor"] == f"{token.split('_')[1]} operator"
        assert token[16:].encode() not in answer.body

    def test_a_token_is_checked_before_the_body_is_read(self, guarded):
        answer = guarded.post("/v1/tasks", b"x", headers={"content-length": str(1 << 40)})
        answer.refused(401, "unauthorized")


class TestRates:
    def test_beyond_its_rate_a_token_is_429_with_retry_after(self, make_api):
        api = make_api()
        token = api.token("read", rate=0.01)
        api.get("/v1/tasks", token=token, status=200)
        answer = api.get("/v1/tasks", token=token)
        answer.refused(429, "rate_limited")
        assert 50 <= int(answer.headers["retry-after"]) <= 101

    def test_tokens_have_separate_rates(self, make_api):
        api = make_api()
        one, two = api.token("read", rate=0.01), api.token("read", rate=0.01)
        api.get("/v1/tasks", token=one, status=200)
        api.get("/v1/tasks", token=one).refused(429, "rate_limited")
        api.get("/v1/tasks", token=two, status=200)

    def test_the_default_rate_applies_to_a_token_without_one(self, make_api):
        api = make_api(rate=0.01)
        slow, fast = api.token("read"), api.token("read", rate=1_000)
        api.get("/v1/tasks", token=slow, status=200)
        api.get("/v1/tasks", token=slow).refused(429, "rate_limited")
        for _ in range(5):
            api.get("/v1/tasks", token=fast, status=200)

    def test_without_a_rate_there_is_no_limit(self, guarded):
        for _ in range(200):
            guarded.get("/v1/wheel", token=guarded.tokens["read"], status=200)

    def test_the_rate_recovers_with_time(self, make_api):
        from tickwheel.clock import ManualClock

        api = make_api()
        clock = api.app.guard._clock = ManualClock()
        token = api.token("read", rate=2)
        for _ in range(2):
            api.get("/v1/tasks", token=token, status=200)
        api.get("/v1/tasks", token=token).refused(429, "rate_limited")
        clock.advance(0.5)
        api.get("/v1/tasks", token=token, status=200)
        api.get("/v1/tasks", token=token).refused(429, "rate_limited")
        clock.advance(1_000)
        statuses = [api.get("/v1/tasks", token=token).status for _ in range(4)]
        assert statuses == [200, 200, 429, 429]


class Town:
    """Two namespaces with the same names in both, and a token for each."""

    def __init__(self, api):
        self.api = api
        self.operator = api.token("admin")
        self.acme = api.token("admin", namespace="acme")
        self.zeta = api.token("admin", namespace="zeta")
        self.plain = api.token("admin", namespace="")
        self.of_zeta = {  # two ways to be confined to the namespace zeta
            "token": {"token": self.zeta},
            "header": {"token": self.operator, "headers": {"tickwheel-namespace": "zeta"}},
        }
        self.tasks, self.final = {}, {}
        for name in ("acme", "zeta", "plain"):
            token = getattr(self, name)
            api.service("mail", token=token, enabled=False, secret=SECRET)
            api.service(f"only-{name}", token=token, enabled=False)
            body = {"service": "mail", "interval": 3600, "payload": name, "enabled": False}
            api.put("/v1/schedules/daily", body, token=token, status=201)
            self.tasks[name] = api.submit(payload=name, key="k", token=token)
            done = api.submit(payload=name, token=token)["id"]
            api.post(f"/v1/tasks/{done}/cancel", token=token, status=200)
            self.final[name] = done


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    with Api(f"sqlite:///{tmp_path_factory.mktemp('town')}/tasks.db") as api:
        yield Town(api)


ways = pytest.mark.parametrize("way", ["token", "header"])


class TestNamespaces:
    """Another namespace is invisible: by id, by name and in lists."""

    @ways
    @pytest.mark.parametrize("owner", ["acme", "plain"])
    def test_another_ones_task_is_unknown_and_stays_as_it_is(self, town, owner, way):
        for task_id in (town.tasks[owner]["id"], town.final[owner]):
            before = town.api.get(f"/v1/tasks/{task_id}", token=town.operator, status=200).json
            for route in (one for one in GUARDED if "{id}" in one.path):
                answer = ask(town.api, route, task_id=task_id, **town.of_zeta[way])
                unknown = ask(town.api, route, task_id=UNKNOWN_ID, **town.of_zeta[way])
                assert (answer.status, answer.code) == (404, "unknown_task"), route.path
                assert answer.detail.replace(task_id, UNKNOWN_ID) == unknown.detail
            after = town.api.get(f"/v1/tasks/{task_id}", token=town.operator, status=200).json
            assert after == before

    @ways
    @pytest.mark.parametrize("route", named(route for route in GUARDED if "{name}" in route.path))
    def test_a_name_is_looked_up_in_the_own_namespace(self, make_api, route, way):
        town = Town(make_api())
        name = "daily" if "schedules" in route.path else "mail"
        listing = f"/v1/{route.parts[1]}"
        before = town.api.get(listing, token=town.acme, status=200).json
        fresh = "only-acme" if route.parts[1] == "services" else "nothing"
        if route.parts[1] == "nodes":  # they belong to no namespace
            ask(town.api, route, name=name, **town.of_zeta[way]).refused(403, "forbidden")
        elif route.method in ("GET", "DELETE"):
            assert ask(town.api, route, name=fresh, **town.of_zeta[way]).status == 404
        else:
            ask(town.api, route, name=name, **town.of_zeta[way])
        assert town.api.get(listing, token=town.acme, status=200).json == before

    @ways
    def test_a_list_has_nothing_of_others(self, town, way):
        foreign = ("only-acme", "only-plain", "acme", '"plain"')
        foreign += (town.tasks["acme"]["id"], town.final["plain"])
        for route in GUARDED:
            if route.method == "GET" and "{" not in route.path:
                text = town.api.get(route.path, **town.of_zeta[way], status=200).body.decode()
                assert not [one for one in foreign if one in text], route.path

    @pytest.mark.parametrize("who", ["acme", "zeta", "plain"])
    def test_a_list_has_the_own_items(self, town, who):
        token = getattr(town, who)

        def items(path):
            return town.api.get(path, token=token, status=200).json["items"]

        assert {one["payload"] for one in items("/v1/tasks")} == {who}
        assert {one["payload"] for one in items("/v1/tasks?key=k&service=mail")} == {who}
        assert {one["id"] for one in items("/v1/backlog")} == {town.final[who]}
        assert {one["name"] for one in items("/v1/services")} == {"mail", f"only-{who}"}
        for path in ("/v1/schedules", "/v1/schedules?limit=1", "/v1/schedules?cursor=a"):
            assert {one["payload"] for one in items(path)} == {who}
        assert items("/v1/schedules?cursor=daily") == []
        shown = "default" if who == "plain" else who
        assert {one["namespace"] for one in items("/v1/audit")} == {shown}

    def test_names_are_shown_without_the_namespace(self, town):
        for path in (f"/v1/tasks/{town.tasks['acme']['id']}", "/v1/schedules/daily"):
            assert town.api.get(path, token=town.acme).json["service"] == "mail"
        stats = town.api.get("/v1/stats", token=town.acme).json
        assert {"mail", "only-acme"} == set(stats["services"])

    @ways
    def test_bulk_cancel_and_replay_stay_in_the_namespace(self, make_api, way):
        town = Town(make_api())
        for where in ({"key": "k"}, {"service": "mail"}):
            town.api.submit(token=town.zeta)
            town.api.post("/v1/tasks/cancel", where, **town.of_zeta[way], status=200)
        body = {"state": "cancelled", "force": True}
        town.api.post("/v1/backlog/replay", body, **town.of_zeta[way], status=200)
        for who in ("acme", "plain"):
            task = town.api.get(f"/v1/tasks/{town.tasks[who]['id']}", token=town.operator).json
            assert task["state"] == "delay"
            final = town.api.get(f"/v1/tasks/{town.final[who]}", token=town.operator).json
            assert final["replayed_as"] is None

    def test_a_service_of_another_namespace_is_unknown_to_submit(self, town):
        for service in ("only-acme", "only-plain"):
            answer = town.api.post("/v1/tasks", {"service": service}, token=town.zeta)
            answer.refused(422, "unknown_service")
            batch = town.api.post("/v1/tasks/batch", [{"service": service}], token=town.zeta)
            assert batch.json["items"][0]["problem"]["code"] == "unknown_service"
        body = {"service": "only-acme", "interval": 60}
        answer = town.api.put("/v1/schedules/mine", body, token=town.zeta)
        answer.refused(422, "unknown_service")
        town.api.post("/v1/tasks", {"service": "acme/mail"}, token=town.zeta).refused(
            422, "invalid"
        )

    def test_a_cursor_of_another_namespace_shows_nothing_of_it(self, town):
        path = f"/v1/tasks?cursor={'f' * 32}"
        items = town.api.get(path, token=town.zeta, status=200).json["items"]
        assert {one["payload"] for one in items} == {"zeta"}

    def test_the_header_chooses_for_a_token_of_any_namespace(self, town):
        for who in ("acme", "zeta", "default"):
            headers = {"tickwheel-namespace": who}
            answer = town.api.get("/v1/tasks", token=town.operator, headers=headers, status=200)
            shown = "plain" if who == "default" else who
            assert {one["payload"] for one in answer.json["items"]} == {shown}
        items = town.api.get("/v1/tasks", token=town.operator).json["items"]
        assert {one["payload"] for one in items} == {"plain"}

    def test_the_header_cannot_leave_the_namespace_of_a_token(self, town):
        own = {"tickwheel-namespace": "zeta"}
        town.api.get("/v1/tasks", token=town.zeta, headers=own, status=200)
        for other in ("acme", "default"):
            headers = {"tickwheel-namespace": other}
            answer = town.api.get("/v1/tasks", token=town.zeta, headers=headers)
            answer.refused(403, "forbidden")
        headers = {"tickwheel-namespace": "acme"}
        town.api.get("/v1/tasks", token=town.plain, headers=headers).refused(403, "forbidden")

    @pytest.mark.parametrize(
        "namespace", ["", " ", "a/b", "a b", "x" * 51, "é", "*", "../acme", "acme/"]
    )
    def test_an_invalid_namespace_header_is_400(self, town, namespace):
        headers = {"tickwheel-namespace": namespace}
        for token in (town.operator, town.zeta, town.plain):
            answer = town.api.get("/v1/tasks", token=token, headers=headers)
            assert "1 to 50" in answer.refused(400, "bad_request")["detail"]

    def test_the_header_can_confine_to_the_default_namespace(self, town):
        headers = {"tickwheel-namespace": "default"}
        options = {"token": town.operator, "headers": headers}
        town.api.get(f"/v1/tasks/{town.tasks['plain']['id']}", **options, status=200)
        answer = town.api.get(f"/v1/tasks/{town.tasks['acme']['id']}", **options)
        answer.refused(404, "unknown_task")
        lines = town.api.get("/v1/audit", **options, status=200).json["items"]
        assert {line["namespace"] for line in lines} == {"default"}

    def test_without_the_header_a_token_of_any_namespace_finds_every_id(self, town):
        for who in ("acme", "zeta", "plain"):
            path = f"/v1/tasks/{town.tasks[who]['id']}"
            assert town.api.get(path, token=town.operator, status=200).json["payload"] == who

    def test_without_a_token_the_header_confines_too(self, api):
        acme, zeta = ({"tickwheel-namespace": name} for name in ("acme", "zeta"))
        api.put("/v1/services/mail", {"endpoint": "http://127.0.0.1:9/"}, headers=acme, status=201)
        body = {"service": "mail", "delay": 60}
        path = f"/v1/tasks/{api.post('/v1/tasks', body, headers=acme, status=201).json['id']}"
        api.get(path, headers=acme, status=200)
        api.get(path, headers=zeta).refused(404, "unknown_task")
        api.post(f"{path}/cancel", headers=zeta).refused(404, "unknown_task")
        assert api.get("/v1/audit", headers=zeta, status=200).json["items"] == []
        assert "mail" not in api.get("/metrics", headers=zeta, status=200).body.decode()
        api.get(path, status=200)
        api.get(path, headers={"tickwheel-namespace": ""}).refused(400, "bad_request")

    def test_no_path_leads_into_another_namespace(self, town):
        for path in ("acme%2Fmail", "acme/mail", "..%2Facme%2Fmail"):
            answer = town.api.get(f"/v1/services/{path}", token=town.zeta)
            assert answer.status in (404, 422)

    def test_on_postgres_namespaces_are_separate_too(self, postgres_url, make_api):
        town = Town(make_api(postgres_url))
        for who in ("acme", "zeta", "plain"):
            token = getattr(town, who)
            items = town.api.get("/v1/tasks", token=token).json["items"]
            assert {one["payload"] for one in items} == {who}
            assert len(items) == 2
        town.api.get(f"/v1/tasks/{town.tasks['acme']['id']}", token=town.zeta).refused(
            404, "unknown_task"
        )


class TestOpenMode:
    """Without tokens only this machine has access, but no web page in its browsers."""

    @pytest.mark.parametrize(
        "host",
        ["localhost", "localhost:7380", "LOCALHOST", "127.0.0.1:7380", "127.0.0.2", "[::1]:80"],
    )
    def test_a_loopback_name_is_accepted(self, api, host):
        api.get("/v1/tasks", headers={"host": host}, status=200)

    @pytest.mark.parametrize(
        "host",
        ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:7380",
         "127.0.0.1@evil.example", "", "10.0.0.1", "[::2]", "localhost:80:80", "localhost:x"],
    )  # fmt: skip
    def test_another_host_is_403(self, api, host):
        api.get("/v1/tasks", headers={"host": host}).refused(403, "forbidden")

    @pytest.mark.parametrize(
        "origin",
        ["http://evil.example", "null", "http://127.0.0.1:9999", "http://localhost:7380",
         "https://127.0.0.1:7380.evil.example", "", "file://"],
    )  # fmt: skip
    def test_a_page_of_another_origin_is_403(self, api, origin):
        headers = {"host": "127.0.0.1:7380", "origin": origin}
        for method, path, body in (
            ("GET", "/v1/tasks", None),
            ("POST", "/v1/tasks/cancel", {"key": "a"}),
            ("PUT", "/v1/services/mail", {"endpoint": "http://127.0.0.1:9/"}),
        ):
            api.request(method, path, body, headers=headers).refused(403, "forbidden")

    @pytest.mark.parametrize("name", ["forwarded", "via", "x-forwarded-for", "x-real-ip"])
    def test_a_request_through_a_proxy_is_403_without_a_token(self, api, name):
        through = {"host": "127.0.0.1:7380", name: "203.0.113.9"}
        told = api.get("/v1/tasks", headers=through).refused(403, "forbidden")
        assert "token" in told["detail"]
        api.get("/healthz", headers=through, status=200)
        api.get("/v1/tasks", headers=through, token=api.token("read"), status=200)

    def test_a_page_of_the_same_origin_is_accepted(self, api):
        headers = {"host": "127.0.0.1:7380", "origin": "http://127.0.0.1:7380"}
        api.get("/v1/tasks", headers=headers, status=200)

    def test_no_answer_has_cors_headers(self, api):
        headers = {"origin": "http://127.0.0.1:7380"}
        for method in ("GET", "OPTIONS"):
            answer = api.request(method, "/v1/tasks", headers=headers)
            assert not any(name.startswith("access-control") for name in answer.headers)

    def test_with_a_token_any_host_is_accepted(self, make_api):
        api = make_api()
        token = api.token("read")
        headers = {"host": "ticks.example", "origin": "https://ticks.example"}
        api.get("/v1/tasks", headers=headers, token=token, status=200)

    OURS = ("192.168.0.7:7380", "10.0.0.1", "[2001:db8::1]:7380", "ticks:7380", "localhost")

    def test_with_open_access_the_host_may_be_an_address_or_a_name_without_a_dot(self, make_api):
        api = make_api(local=False, open_access=True, loopback_only=False)
        for host in self.OURS:
            own = {"host": host, "origin": f"http://{host}", "x-forwarded-for": "203.0.113.9"}
            api.get("/v1/tasks", headers={"host": host}, status=200)
            api.get("/v1/tasks", headers=own, status=200)

    @pytest.mark.parametrize("local", [True, False], ids=["loopback", "anywhere"])
    def test_with_open_access_pages_of_other_sites_are_refused(self, make_api, local):
        """Neither by its origin, nor by a DNS name that resolves to this host."""
        api = make_api(local=local, open_access=True, loopback_only=local)
        headers = [{"host": "127.0.0.1:7380", "origin": "http://evil.example"}]
        for host in ("evil.example", "evil.example:7380", "1.2.3.4.evil.example", "evil.", ""):
            headers += [{"host": host}, {"host": host, "origin": f"http://{host}"}]
        if local:
            headers.append({"host": "10.0.0.1:7380"})
        for one in headers:
            api.get("/v1/tasks", headers=one).refused(403, "forbidden")
            api.post("/v1/tasks/cancel", {"key": "a"}, headers=one).refused(403, "forbidden")

    def test_off_loopback_a_token_is_needed(self, make_api):
        make_api(local=False).get("/v1/tasks").refused(401, "unauthorized")


class TestStart:
    """A server on a public address needs a token to start, unless a flag allows it without."""

    def test_off_loopback_without_a_token_it_refuses_to_start(self, tmp_path, sqlite_url):
        server = Served("--store", sqlite_url, cwd=tmp_path, listen="0.0.0.0:0").launch()
        out, _ = server.process.communicate(timeout=30)
        assert server.process.returncode == 2
        assert out == b""
        message = server.lines()[-1]["message"]
        assert "token" in message
        assert "--insecure-without-tokens" in message

    def test_with_a_token_it_starts_and_requires_it(self, serve, sqlite_url):
        token = create_token(sqlite_url, "read")
        server = serve(listen="0.0.0.0:0")
        server.get("/v1/tasks").refused(401, "unauthorized")
        server.get("/v1/tasks", token=token, status=200)

    def test_with_the_flag_it_starts_without_a_token(self, serve):
        server = serve("--insecure-without-tokens", listen="0.0.0.0:0")
        server.get("/v1/tasks", headers={"host": "10.1.2.3:7380"}, status=200)
        server.get("/v1/tasks", headers={"host": "ticks.example"}).refused(403, "forbidden")

    def test_on_loopback_the_flag_still_requires_loopback_names(self, serve):
        server = serve("--insecure-without-tokens")
        server.get("/v1/tasks", status=200)
        server.get("/v1/tasks", headers={"host": "ticks.example"}).refused(403, "forbidden")
        server.get("/v1/tasks", headers={"host": "10.1.2.3"}).refused(403, "forbidden")
        page = {"origin": "http://evil.example"}
        server.get("/v1/tasks", headers=page).refused(403, "forbidden")

    def test_with_the_last_token_revoked_it_starts_and_requires_a_new_one(
        self, store_url, serve, receiver
    ):
        server = serve(store=store_url)
        server.service(endpoint=receiver.url("/ok"))
        token = create_token(store_url, "admin")
        on_store(store_url, lambda store: revoked(store, token))
        server.stop()
        again = serve(store=store_url)
        for given in (None, token):
            again.get("/v1/tasks", token=given).refused(401, "unauthorized")
            again.put(
                "/v1/services/mine", {"endpoint": "http://127.0.0.1:9/"}, token=given
            ).refused(401, "unauthorized")
        assert "every token of this store was revoked" in again.log()
        again.get("/v1/tasks", token=create_token(store_url, "read"), status=200)

    def test_with_all_tokens_revoked_it_starts_off_loopback_and_runs_tasks(
        self, serve, sqlite_url, receiver
    ):
        server = serve()
        server.service(endpoint=receiver.url("/ok"))
        server.submit(delay=1)
        token = create_token(sqlite_url, "admin")
        on_store(sqlite_url, lambda store: revoked(store, token))
        server.stop()
        again = serve(listen="0.0.0.0:0")
        receiver.wait(lambda: receiver.requests)
        again.get("/v1/tasks").refused(401, "unauthorized")

    def test_tokens_made_and_revoked_while_it_runs_take_effect(self, serve, sqlite_url):
        server = serve()
        server.get("/v1/tasks", status=200)
        token = create_token(sqlite_url, "read")
        other = create_token(sqlite_url, "read")
        wait_until(lambda: server.get("/v1/tasks").status == 401, "the door closes")
        server.get("/v1/tasks", token=token, status=200)
        on_store(sqlite_url, lambda store: revoked(store, token))
        wait_until(lambda: server.get("/v1/tasks", token=token).status == 401, "it is revoked")
        server.get("/v1/tasks", token=other, status=200)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


class TestWithoutRead:
    """A token with the scope `submit` sees no payload, result or error except its own payload."""

    SHOWN = ("payload", "result", "error")

    @pytest.fixture
    def api(self, api, receiver):
        api.service(endpoint=receiver.url("/ended"), max_attempts=1)
        api.service("later", enabled=False)
        api.reader, api.submitter = api.token("read", "submit"), api.token("submit")
        return api

    def ended(self, api, **options):
        """Submit a task; return it once it has ended."""
        task = api.post("/v1/tasks", {"service": "mail", "payload": "hunter2"}, **options).json
        path = f"/v1/tasks/{task['id']}"

        async def look():
            found = (await api.asked("GET", path, token=api.reader)).json
            return found if found["state"] in ("finished", "failed") else None

        return api.until(look, "the task has ended")

    def hidden(self, answer):
        """Check that the task in an answer has no payload, result or error."""
        assert b"hunter2" not in answer.body
        assert [answer.json[name] for name in self.SHOWN] == [None] * 3

    def test_only_these_routes_answer_a_submitter_with_a_task(self):
        """A new one needs a test below; `task_view` hides the payload, result and error."""
        found = {
            route.path
            for route in GUARDED
            if route.scope == "submit" and schemas.Task in route.gives.values()
        }
        assert found == {"/v1/tasks", "/v1/backlog/{id}/replay"}

    def test_a_task_that_is_kept_or_replaced_shows_nothing_of_another(self, api):
        body = {"service": "later", "key": "k", "delay": 60, "payload": "hunter2"}
        api.post("/v1/tasks", body, token=api.reader, status=201)
        body = {"service": "later", "key": "k", "on_conflict": "keep"}
        kept = api.post("/v1/tasks", body, token=api.reader, status=200)
        assert kept.json["payload"] == "hunter2"
        for on_conflict in ("keep", "replace"):
            body["on_conflict"] = on_conflict
            self.hidden(api.post("/v1/tasks", body, token=api.submitter, status=200))

    def test_a_replay_by_the_id_in_a_409_shows_nothing_of_the_task(self, api):
        body = {"service": "later", "key": "k", "delay": 60, "payload": "hunter2"}
        api.post("/v1/tasks", body, token=api.reader, status=201)
        taken = api.post("/v1/tasks", {"service": "later", "key": "k"}, token=api.submitter)
        holder = taken.refused(409, "key_taken")["holder"]
        cancelled = api.post(f"/v1/tasks/{holder}/cancel", token=api.submitter, status=200)
        replayed = api.post(f"/v1/backlog/{holder}/replay", token=api.submitter, status=201)
        assert b"hunter2" not in taken.body + cancelled.body
        self.hidden(replayed)
        again = api.post(f"/v1/backlog/{holder}/replay", token=api.submitter)
        again.refused(409, "already_replayed")
        assert b"hunter2" not in again.body
        task = api.get(f"/v1/tasks/{replayed.json['id']}", token=api.reader, status=200).json
        assert task["payload"] == "hunter2"

    @pytest.mark.parametrize("status", [200, 400])
    def test_a_repeated_request_shows_no_result_and_no_error(self, api, receiver, status):
        receiver.on("/ended", answering(status, b'"hunter2"', content_type="application/json"))
        named = {"token": api.reader, "headers": {"idempotency-key": "one"}}
        task = self.ended(api, **named)
        assert "hunter2" in (task["result"] or task["error"])
        body = {"service": "mail", "payload": "hunter2"}
        again = api.post("/v1/tasks", body, **named, status=201)
        assert again.json == task
        again = api.post("/v1/tasks", body, **{**named, "token": api.submitter}, status=201)
        assert again.json["id"] == task["id"]
        self.hidden(again)

    def test_batches_feedback_and_cancels_show_nothing(self, api):
        body = {"service": "later", "key": "k", "delay": 60, "payload": "hunter2"}
        task_id = api.post("/v1/tasks", body, token=api.reader, status=201).json["id"]
        batch = [{"service": "later", "key": "k", "on_conflict": how} for how in ("keep", "reject")]
        feedback = {"outcome": "finished", "attempt": 1}
        for path, given in (
            ("/v1/tasks/batch", batch),
            (f"/v1/tasks/{task_id}/feedback", feedback),
            (f"/v1/tasks/{task_id}/reschedule", {"delay": 90}),
            ("/v1/tasks/cancel", {"key": "k"}),
            ("/v1/backlog/replay", {"key": "k", "state": "cancelled"}),
        ):
            assert b"hunter2" not in api.post(path, given, token=api.submitter).body

    def test_the_answer_to_a_submit_has_its_own_payload(self, api):
        own = {"service": "later", "payload": "mine", "delay": 60}
        task = api.post("/v1/tasks", own, token=api.submitter, status=201).json
        assert task["payload"] == "mine"


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/openapi.json", "/"])
def test_a_probe_may_add_any_query(api, path):
    async def is_ready():
        return (await api.asked("GET", "/readyz")).status == 200

    api.until(is_ready, "the node is ready")
    for query in ("ts=1", "collect[]=cpu&collect[]=x", "%ff", "a" * 3_000):
        api.get(f"{path}?{query}", status=200)

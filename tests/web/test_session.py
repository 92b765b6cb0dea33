"""Sessions of browsers: a token in a cookie, refused to other sites, and gone with its token."""

import hmac
from unittest.mock import Mock, call

import pytest

from web.serving import HOST

PORT = HOST.rpartition(":")[2]
COOKIE = f"tickwheel-{PORT}"


def sign_in(api, token, **headers):
    return api.post("/v1/session", {"token": token}, headers=headers)


def session(api, token):
    """Sign in; return the headers of later requests."""
    answer = sign_in(api, token).check(200)
    cookie = answer.headers["set-cookie"].partition(";")[0]
    return {"cookie": cookie, "tickwheel-csrf": answer.json["csrf"]}


class TestSignIn:
    def test_the_cookie_is_out_of_reach_of_scripts_and_of_other_sites(self, api):
        token = api.token("read", name="operator")
        answer = sign_in(api, token).check(200)
        name, *attributes = answer.headers["set-cookie"].split("; ")
        assert name == f"{COOKIE}={token}"
        assert sorted(attributes) == ["HttpOnly", "SameSite=Strict"]
        assert answer.json["scopes"] == ["read"]
        assert answer.json["actor"].endswith(" operator")
        assert answer.headers["cache-control"] == "no-store"

    def test_under_tls_the_cookie_is_secure(self, api):
        """The scheme is that of the connection to this server, as uvicorn gives it."""
        token = api.token("read")
        app = api.app

        class Tls:
            def __getattr__(self, name):
                return getattr(app, name)

            async def __call__(self, scope, receive, send):
                await app({**scope, "scheme": "https"}, receive, send)

        api.app = Tls()
        assert "; Secure" in sign_in(api, token).check(200).headers["set-cookie"]

    def test_behind_a_proxy_that_terminates_tls_the_cookie_is_secure(self, api):
        """Between the proxy and this server the scheme is http; the browser's origin is https."""
        own = {"host": "jobs.example.com", "origin": "https://jobs.example.com"}
        answer = sign_in(api, api.token("admin"), **own).check(200)
        cookie, *attributes = answer.headers["set-cookie"].split("; ")
        assert sorted(attributes) == ["HttpOnly", "SameSite=Strict", "Secure"]
        headers = {**own, "cookie": cookie, "tickwheel-csrf": answer.json["csrf"]}
        body = {"endpoint": "http://127.0.0.1:9/"}
        api.put("/v1/services/mail", body, headers=headers, status=201)
        removed = api.delete("/v1/session", headers=headers, status=204).headers["set-cookie"]
        name, *attributes = removed.split("; ")
        assert name == cookie.partition("=")[0] + "="
        assert sorted(attributes) == ["HttpOnly", "Max-Age=0", "SameSite=Strict", "Secure"]
        plain = {"host": "jobs.example.com", "origin": "http://jobs.example.com"}
        assert "Secure" not in sign_in(api, api.token("read"), **plain).headers["set-cookie"]

    def test_a_wrong_token_signs_nobody_in(self, api):
        api.token("read")
        for token in ("tw_0123456789ab_" + "x" * 43, "nonsense", "ü"):
            answer = sign_in(api, token)
            answer.refused(401, "unauthorized")
            assert "set-cookie" not in answer.headers

    def test_a_page_of_another_origin_signs_nobody_in(self, api):
        token = api.token("read")
        sign_in(api, token, origin="http://evil.example").refused(403, "forbidden")
        sign_in(api, token, origin=f"http://{HOST}").check(200)

    def test_where_no_token_is_needed_a_cookie_of_another_store_does_not_matter(self, api):
        left = {"cookie": f"{COOKIE}=tw_0123456789ab_{'x' * 43}"}
        assert api.get("/v1/session", headers=left, status=200).json["csrf"] is None
        api.post("/v1/tasks", {"service": "none"}, headers=left).refused(422, "unknown_service")
        api.token("read")
        api.get("/v1/session", headers=left).refused(401, "unauthorized")

    def test_signing_out_removes_the_cookie(self, api):
        cookie = api.delete("/v1/session", status=204).headers["set-cookie"]
        assert cookie.startswith(f"{COOKIE}=;")
        assert "Max-Age=0" in cookie


class TestRequests:
    def test_the_cookie_is_as_good_as_the_token(self, api):
        headers = session(api, api.token("read", "submit"))
        assert api.get("/v1/session", headers=headers, status=200).json["csrf"]
        api.get("/v1/tasks", headers=headers, status=200)
        api.get("/v1/tasks").refused(401, "unauthorized")
        api.put("/v1/services/a", {"endpoint": "http://127.0.0.1:9/"}, headers=headers).refused(
            403, "forbidden"
        )

    def test_csrf_tokens_are_compared_in_constant_time(self, api, monkeypatch):
        headers = session(api, api.token("submit"))
        compare = Mock(wraps=hmac.compare_digest)
        monkeypatch.setattr(hmac, "compare_digest", compare)
        right = headers["tickwheel-csrf"].encode()
        for given in (right, b"0" * 32):
            compare.reset_mock()
            api.post(
                "/v1/tasks/cancel",
                {"key": "k"},
                headers={**headers, "tickwheel-csrf": given.decode()},
            )
            assert call(given, right) in compare.call_args_list

    def test_a_change_needs_the_csrf_token(self, api):
        headers = session(api, api.token("admin"))
        body = {"endpoint": "http://127.0.0.1:9/"}
        wrong = {**headers, "tickwheel-csrf": "0" * 32}
        without = {"cookie": headers["cookie"]}
        for given in (without, wrong):
            api.put("/v1/services/mail", body, headers=given).refused(403, "forbidden")
        api.put("/v1/services/mail", body, headers=headers).check(201)

    @pytest.mark.parametrize(
        "sent",
        [
            {"origin": "http://evil.example"},
            {"origin": "null"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
        ],
    )
    def test_a_request_of_another_site_is_refused(self, api, sent):
        headers = session(api, api.token("admin"))
        api.get("/v1/tasks", headers=headers | sent).refused(403, "forbidden")

    def test_a_revoked_token_ends_its_sessions(self, api):
        token = api.token("read")
        headers = session(api, token)
        api.token("admin")  # the store still has one
        api.revoke(token)
        api.get("/v1/tasks", headers=headers).refused(401, "unauthorized")

    def test_the_cookie_of_another_port_is_ignored(self, api):
        token = api.token("read")
        api.get("/v1/tasks", headers={"cookie": f"tickwheel-1={token}"}).refused(
            401, "unauthorized"
        )

    def test_a_token_in_a_header_counts_before_the_cookie(self, api):
        headers = session(api, api.token("read"))
        api.get("/v1/audit", headers=headers, token=api.token("admin")).check(200)

    def test_without_tokens_everybody_on_this_machine_has_a_session(self, api):
        found = api.get("/v1/session", status=200).json
        assert (found["actor"], found["csrf"]) == ("anybody", None)
        assert found["scopes"] == ["submit", "read", "admin"]
        other = {"host": "evil.example"}
        api.get("/v1/session", headers=other).refused(403, "forbidden")

"""The dashboard in a browser: what a change keeps, whose change wins, and sessions that end."""

import re

import pytest
from playwright.sync_api import expect

from web.browsing import (
    check_accessibility,
    confirm,
    elsewhere,
    expects,
    heading,
    opened,
    press,
    sign_in,
    told,
)
from web.serving import Served, create_token, on_store, revoked

WATCHDOG = 240.0
EXACT = rb'{"z" : 1.0, "big":12345678901234567890, "a": 1, "a":2e0, "u":"\u00e9"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory, callee):
    path = tmp_path_factory.mktemp("changes")
    options = ["--store", f"sqlite:///{path}/tasks.db", "--allow-private-targets"]
    with Served(*options, cwd=path) as server:
        server.service("mail", callee.url("/ok"))
        yield server


@pytest.fixture
def page(browser, server):
    with opened(browser, server.url) as page:
        yield page


class TestPayloads:
    """A payload is bytes: no page may write other ones than it has read."""

    @pytest.fixture
    def exact(self, server):
        body = b'{"service":"mail","cron":"0 3 * * *","payload":' + EXACT + b"}"
        server.put("/v1/schedules/exact", body)
        return lambda: server.get("/v1/schedules/exact").body

    def test_a_change_of_a_schedule_keeps_its_payload(self, page, exact):
        page.go("schedules/exact")
        expect(page.get_by_label("Payload")).to_contain_text('"big": 12345678901234567890')
        press(page, "Pause")
        told(page, "Paused")
        press(page, "Resume")
        told(page, "Resumed")
        press(page, "Edit")
        page.get_by_label("Time zone").fill("Europe/Berlin")
        confirm(page, "Store")
        expect(page.locator(".facts")).to_contain_text("Europe/Berlin")
        assert EXACT in exact()

    def test_an_edited_payload_is_stored_as_it_was_typed(self, page, exact):
        page.go("schedules/exact")
        press(page, "Edit")
        page.get_by_label("Payload, as JSON").fill('{"b": 1.00, "b":99999999999999999999}')
        confirm(page, "Store")
        shown = page.get_by_role("group", name="Payload")  # not the field of the dialog
        expect(shown).to_contain_text('"b": 99999999999999999999')
        assert b'{"b": 1.00, "b":99999999999999999999}' in exact()

    def test_a_test_call_sends_the_bytes_that_were_typed(self, page, callee):
        page.go("services/mail")
        press(page, "Test call")
        page.get_by_label("Payload").fill(EXACT.decode())
        confirm(page, "Call it")
        expect(page.get_by_role("dialog")).to_contain_text("finish")
        assert callee.requests[-1].body == EXACT

    def test_a_task_shows_the_bytes_that_were_submitted(self, page, server):
        body = b'{"service":"mail","delay":3600,"payload":' + EXACT + b"}"
        task = server.post("/v1/tasks", body, status=201).json["id"]
        page.go(f"tasks/{task}")
        for part in ('"z": 1.0', '"big": 12345678901234567890', '"a": 1,', '"a": 2e0'):
            expect(page.get_by_label("Payload")).to_contain_text(part)


class TestConflicts:
    def test_a_form_does_not_undo_a_change_of_somebody_else(self, page, server, callee):
        expects(page, 412)
        server.service("shared", callee.url("/ok"))
        page.go("services/shared")
        press(page, "Edit")
        server.service("shared", callee.url("/ok"), rate=7)
        page.get_by_label("Concurrency").fill("3")
        confirm(page, "Store")
        expect(page.get_by_role("alert").last).to_contain_text("Somebody else has changed it")
        confirm(page, "Cancel")
        expect(page.locator(".facts")).to_contain_text("7/s")
        found = server.get("/v1/services/shared").json
        assert (found["rate"], found["concurrency"]) == (7, 100)

    def test_a_pause_does_not_undo_a_change_of_somebody_else(self, page, server):
        expects(page, 412)
        path, body = "/v1/schedules/shared", {"service": "mail", "interval": 3600}
        server.put(path, body)
        page.go("schedules/shared")
        heading(page, "shared")
        server.put(path, {**body, "payload": "new"})
        press(page, "Pause")
        told(page, "Somebody else has changed it")
        expect(page.get_by_role("group", name="Payload")).to_contain_text("new")
        found = server.get(path).json
        assert (found["payload"], found["enabled"]) == ("new", True)

    @pytest.mark.parametrize("kind", ["service", "schedule"])
    def test_a_new_one_does_not_replace_one_of_its_name(self, page, server, callee, kind):
        expects(page, 412)
        server.put("/v1/schedules/mail", {"service": "mail", "interval": 3600})
        page.go(f"{kind}s")
        press(page, f"New {kind}")
        page.get_by_label("Name").fill("mail")
        if kind == "service":
            page.get_by_label("Endpoint").fill(callee.url("/other"))
        else:
            page.get_by_label("Service").fill("mail")
        confirm(page, "Store")
        expect(page.get_by_role("alert").last).to_contain_text("one of this name already")
        assert server.get("/v1/services/mail").json["endpoint"] == callee.url("/ok")


class TestSearch:
    def test_a_search_says_how_far_it_has_looked_and_goes_on(self, browser, tmp_path):
        constants = {"durable.stores.sqlite.store.SCAN": 2}
        options = ["--store", f"sqlite:///{tmp_path}/tasks.db", "--allow-private-targets"]
        with (
            Served(*options, cwd=tmp_path, constants=constants) as own,
            opened(browser, own.url) as page,
        ):
            own.service("off", enabled=False)
            first = own.submit("off", tags=["rare"], delay=3600)["id"]
            own.post("/v1/tasks/batch", [{"service": "off", "delay": 3600}] * 40, status=200)
            page.go("tasks?tag=rare")
            expect(page.locator(".empty")).to_contain_text("among those submitted since")
            press(page, "Search older tasks →")
            expect(page.get_by_role("link", name=re.compile(first[:8]))).to_be_visible()
            page.close()


class TestAccess:
    def test_sign_in_rights_and_sign_out(self, browser, tmp_path, callee):
        with (
            Served(
                "--store", f"sqlite:///{tmp_path}/tasks.db", "--allow-private-targets", cwd=tmp_path
            ) as own,
            opened(browser, own.url) as page,
        ):
            expects(page, 401)
            page.go("tokens")
            press(page, "New token")
            page.get_by_label("Name", exact=True).fill("operator")
            confirm(page, "Create")
            admin = page.get_by_role("group", name="Token").inner_text()  # not the field below it
            confirm(page, "Done")
            heading(page, "Sign in")
            sign_in(page, "tw_000000000000_" + "x" * 43)
            expect(page.get_by_role("alert")).to_contain_text("unknown")
            check_accessibility(page)
            sign_in(page, admin)
            heading(page, "Tokens")
            expect(page.locator("#top")).to_contain_text("operator")
            cookies = page.context.cookies(f"{own.url}/v1/session")
            assert [(one["httpOnly"], one["sameSite"], one["path"]) for one in cookies] == [
                (True, "Strict", "/v1")
            ]
            own.service("mail", callee.url("/ok"), token=admin, enabled=False)
            task = own.submit("mail", token=admin)["id"]
            reader, writer = (
                own.post(
                    "/v1/tokens",
                    {"name": f"may {scope}", "scopes": [scope], "namespace": "*"},
                    token=admin,
                    status=201,
                ).json
                for scope in ("read", "submit")
            )
            for rate in range(1, 51):  # more changes than a page of the audit log has
                own.service("mail", callee.url("/ok"), token=admin, enabled=False, rate=rate)
            page.go(f"tasks/{task}")
            press(page, "Run now")
            told(page, "due now")
            page.go("audit")
            expect(page.locator("tbody tr")).to_have_count(50)
            expect(page.locator("tbody")).not_to_contain_text("token.create")
            press(page, "Older")
            expect(page.locator("tbody")).to_contain_text("token.create")
            press(page, "Sign out")
            sign_in(page, writer["token"])
            heading(page, "This token may not read")
            expect(page.get_by_role("link", name="Tasks")).to_have_count(0)
            press(page, "Sign out")
            sign_in(page, admin)
            page.get_by_role("link", name="Tokens").click()
            press(page, "Revoke may submit")
            confirm(page, "Revoke")
            told(page, "Revoked")
            expect(page.get_by_role("row").filter(has_text="may submit")).to_have_count(0)
            own.get("/v1/session", token=writer["token"], status=401)
            press(page, "Sign out")
            page.go("sign-in")  # where the lab sends a reader
            sign_in(page, reader["token"])
            expect(page.get_by_role("region", name="Figures")).to_be_visible()
            page.go(f"tasks/{task}")
            heading(page, task)
            expect(page.get_by_role("button", name="Run now")).to_have_count(0)
            expect(page.get_by_role("link", name="Tokens")).to_have_count(0)
            own.delete(f"/v1/tokens/{reader['id']}", token=admin, status=204)
            heading(page, "Sign in")

    def test_after_a_restart_the_page_is_live_again(self, browser, tmp_path):
        options = ("--store", f"sqlite:///{tmp_path}/tasks.db", "--allow-private-targets")
        with Served(*options, cwd=tmp_path) as first, opened(browser, first.url) as page:
            expects(page, 0, 503)
            listen = "{}:{}".format(*first.address)
            page.go("")
            expect(page.locator(".live")).to_have_text("Live")
            first.stop()
            expect(page.locator(".live")).to_have_text("Reconnecting …")
            with Served(*options, cwd=tmp_path, listen=listen) as second:
                expect(page.locator(".live")).to_have_text("Live")
                second.service("later")
                expect(page.locator("tbody").first).to_contain_text("later")
                page.close()


class TestSessions:
    def test_a_token_that_ends_while_the_server_is_away_is_not_tried_for_ever(
        self, browser, tmp_path
    ):
        url = f"sqlite:///{tmp_path}/tasks.db"
        first, second = token_in(url), token_in(url)
        with Served("--store", url, cwd=tmp_path) as own, opened(browser, own.url) as page:
            expects(page, 0, 401, 503)
            asked = []
            page.on("request", lambda one: "/v1/live" in one.url and asked.append(one.url))
            page.go("services")
            sign_in(page, first)
            expect(page.locator(".live")).to_have_text("Live")
            listen = "{}:{}".format(*own.address)
            own.stop()
            expect(page.locator(".live")).to_have_text("Reconnecting …")
            elsewhere(on_store, url, lambda store: revoked(store, first))
            with Served("--store", url, cwd=tmp_path, listen=listen):
                heading(page, "Sign in")
                expect(page.get_by_role("alert")).to_contain_text("session has ended")
                before = len(asked)
                page.wait_for_timeout(1_500)  # a stream would be tried again after half a second
                assert len(asked) == before
                sign_in(page, second)
                heading(page, "Services")
                expect(page.locator(".live")).to_have_text("Live")
                page.close()

    def test_the_namespace_of_an_earlier_session_does_not_keep_anybody_out(self, browser, tmp_path):
        url = f"sqlite:///{tmp_path}/tasks.db"
        anywhere, shop = token_in(url), token_in(url, namespace="shop")
        with Served("--store", url, cwd=tmp_path) as own, opened(browser, own.url) as page:
            expects(page, 401, 403)
            page.go("services")
            sign_in(page, anywhere)
            press(page, "namespace")
            page.get_by_label("Show the tasks").fill("other")
            confirm(page, "Use it")
            expect(page.locator("#top")).to_contain_text("other")
            press(page, "Sign out")
            sign_in(page, shop)
            heading(page, "Services")
            expect(page.locator("#top")).to_contain_text("shop")
            page.close()

    def test_without_cookies_the_form_says_so(self, browser, tmp_path):
        url = f"sqlite:///{tmp_path}/tasks.db"
        token = token_in(url)
        with Served("--store", url, cwd=tmp_path) as own, opened(browser, own.url) as page:
            expects(page, 401)
            page.go("")
            heading(page, "Sign in")
            page.route("**/v1/session", without_cookies)
            sign_in(page, token)
            expect(page.get_by_role("alert")).to_contain_text("allow cookies")


def token_in(url, **options):
    return elsewhere(create_token, url, "read", **options)


def without_cookies(route):
    """Answer as the server does, without the cookie: the browser refuses to keep it."""
    answer = route.fetch()
    headers = {name: value for name, value in answer.headers.items() if name != "set-cookie"}
    route.request.frame.page.context.clear_cookies()  # `fetch` kept it
    route.fulfill(response=answer, headers=headers)

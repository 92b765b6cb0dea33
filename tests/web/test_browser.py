"""The dashboard in a real browser over a real server: every page, every action, no console error.

Needs Debian's chromium. One browser serves all tests of this module; each has its own profile.
Nothing here runs an event loop: the browser's driver has one in this thread.
"""

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import expect

from receivers import answering
from scenes.worked import WORKED
from tickwheel.values.schedule import firing_key
from web.browsing import confirm, heading, opened, press, told
from web.serving import Served

WATCHDOG = 240.0
NASTY = '<img src=x onerror="document.title=1">\u202egnp.exe\x1b[31mred\U0001f480</script>&amp;'
PHONE = {"width": 390, "height": 844}
LARGE = 10_000_000
KEY = '<img src=x onerror="document.title=1">'


@pytest.fixture(scope="module")
def server(tmp_path_factory, callee):
    """A server with something of each kind."""
    path = tmp_path_factory.mktemp("browser")
    options = ["--allow-private-targets", "--max-payload", "12MiB"]
    with Served("--store", f"sqlite:///{path}/tasks.db", *options, cwd=path) as server:
        server.service("mail", callee.url("/ok"))
        server.service("broken", callee.url("/bad"), max_attempts=2, backoff={"first": 0.01})
        server.service("off", callee.url("/ok"), enabled=False)
        server.put("/v1/schedules/nightly", {"service": "mail", "cron": "0 3 * * *"}, status=201)
        for delay in (900, 1_800, 2_700):  # before the first count of due times, which is kept
            server.submit("off", delay=delay, key=f"by-keyboard-{delay}")
        server.failed = server.submit("broken", delay=0)["id"]
        server.task_in(server.failed, "failed")
        yield server


@pytest.fixture
def page(browser, server):
    with opened(browser, server.url) as page:
        yield page


class TestOverview:
    @pytest.fixture
    def moving(self, browser, server):
        with opened(browser, server.url, reduced_motion="no-preference") as page:
            yield page

    def test_figures_rings_and_charts_follow_what_happens(self, moving, server):
        page = moving
        page.go("")
        expect(page.locator(".live")).to_have_text("Live")
        waiting = page.locator(".figure").filter(has_text="On the wheel").locator(".value")
        expect(waiting).to_have_text(re.compile(r"\d"))
        before = int(waiting.inner_text())
        for _ in range(3):
            server.submit("mail", delay=50)
        expect(waiting).to_have_text(str(before + 3))
        expect(
            page.get_by_role("img", name=re.compile("The wheels as rings; level 1"))
        ).to_be_visible()
        expect(page.get_by_role("group", name=re.compile("Next hour: .* due"))).to_be_visible()
        expect(page.get_by_role("img", name=re.compile("Rates: submitted"))).to_be_visible()
        expect(page.get_by_role("img", name=re.compile("64 shards of 1 node"))).to_be_visible()
        row = page.get_by_role("row").filter(has_text="off")
        expect(row).to_contain_text("paused")

    def test_a_count_of_tasks_that_ended_at_its_bound_says_so(self, page):
        events = 'event: store\ndata: {"live":100000,"final":250000}\n\n'
        page.route(
            "**/v1/live*",
            lambda route: route.fulfill(content_type="text/event-stream", body=events),
        )
        page.go("")
        tile = page.locator(".figure").filter(has_text="Live tasks")
        expect(tile).to_contain_text("100K+")
        expect(tile).to_contain_text("≈ 250K ended")

    def test_a_cell_of_the_due_times_leads_to_its_tasks(self, page, server):
        task = server.submit("off", delay=57, key="in-some-seconds")
        page.go("")
        second = quote(task["due_at"][: len("2030-01-31T12:00:00")])
        row = page.locator(".heat-row").filter(has_text="Next minute")
        row.locator(f"[data-link*='due_after={second}']").click()  # once the page has counted it
        heading(page, "Tasks")
        expect(page.get_by_text(task["key"])).to_be_visible()

    def test_the_keyboard_walks_along_the_due_times(self, page):
        page.go("")
        strip = page.get_by_role("group", name=re.compile("Next hour: .* due"))
        cells = strip.locator("[role=link]")
        expect(cells.nth(2)).to_be_attached()
        expect(strip.locator("[tabindex='0']")).to_have_count(1)
        strip.locator("[tabindex='0']").focus()
        page.keyboard.press("Home")
        expect(cells.first).to_be_focused()
        page.keyboard.press("ArrowRight")
        expect(cells.nth(1)).to_be_focused()
        page.keyboard.press("End")
        expect(cells.last).to_be_focused()
        page.keyboard.press("Enter")
        heading(page, "Tasks")
        expect(page.get_by_label("State")).to_have_value("delay")
        expect(page.locator("tbody tr").first).to_be_visible()

    def test_the_theme_changes_and_is_kept(self, page):
        page.go("")
        press(page, "Change the theme")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


class TestTasks:
    def test_a_search_finds_tasks_by_each_field(self, page, server):
        due = datetime.now(UTC) + timedelta(days=30)
        task = server.submit("off", due_at=due.isoformat(), key="find-me", tags=["blue"])
        other = server.submit("off", key="other")
        page.go("tasks")
        for label, value in {
            "Id or key": "find-me",
            "Tags": "blue",
            "Due from": (due - timedelta(days=2)).strftime("%Y-%m-%dT%H:%M:%S"),
        }.items():
            press(page, "Clear")
            page.get_by_label(label).fill(value)
            page.get_by_label("Service").fill("off")
            page.get_by_label("State").select_option("delay")
            press(page, "Search")
            expect(page.get_by_role("link", name=re.compile(task["id"][:8]))).to_be_visible()
            expect(page.get_by_text("other", exact=True)).to_have_count(0)
        page.get_by_label("Id or key").fill(other["id"])
        press(page, "Search")
        heading(page, other["id"])

    def test_a_task_tells_its_life_with_errors(self, page, server):
        page.go(f"tasks/{server.failed}")
        expect(page.locator(".timeline li")).to_have_count(3)
        expect(page.locator(".timeline")).to_contain_text("Attempt 2")
        expect(page.locator(".timeline")).to_contain_text("failed for good")
        expect(page.locator(".timeline pre").first).to_contain_text("500")

    def test_run_now_reschedule_cancel_and_replay(self, page, server):
        task = server.submit("mail")
        page.go(f"tasks/{task['id']}")
        press(page, "Reschedule")
        page.get_by_label("After a delay").fill("2h")
        confirm(page, "Reschedule")
        told(page, "Rescheduled")
        press(page, "Run now")
        expect(page.locator(".page-head .pill")).to_have_text("finished")
        press(page, "Replay")
        confirm(page, "Replay")
        expect(page.locator(".timeline")).to_contain_text(f"as a replay of {task['id']}")
        other = server.submit("mail")
        page.go(f"tasks/{other['id']}")
        press(page, "Cancel")
        confirm(page, "Cancel the task")
        expect(page.locator(".page-head .pill")).to_have_text("cancelled")

    def test_actions_on_many_tasks_count_and_ask(self, page, server):
        for n in range(5):
            server.submit("off", key=f"bulk-{n}", tags=["bulk"])
        page.go("tasks?tag=bulk&service=off")
        expect(page.locator("tbody tr")).to_have_count(5)
        for box in page.get_by_label("Select the task").all()[:2]:
            box.check()
        selection = page.get_by_role("group", name="Selected tasks")
        expect(selection).to_have_text("2 tasks selectedRun now 2Reschedule 2Cancel 2")
        press(page, "Cancel 2", exact=True)
        confirm(page, "Cancel 2 tasks")
        told(page, "Cancel: 2 of 2 tasks")
        press(page, "Cancel all that match …")
        expect(page.get_by_role("dialog")).to_contain_text("3 tasks match")
        confirm(page, "Cancel 3 tasks")
        told(page, "Cancel: 3 tasks")
        page.go("backlog?tag=bulk&service=off&state=cancelled")
        press(page, "Replay all that match …")
        confirm(page, "Replay 5 tasks")
        told(page, "Replay: 5 tasks")
        for task in server.get("/v1/tasks?tag=bulk&state=delay").json["items"]:
            server.post(f"/v1/tasks/{task['id']}/cancel", status=200)


class TestServices:
    def test_create_edit_pause_try_and_delete(self, page, server, callee):
        page.go("services")
        press(page, "New service")
        page.get_by_label("Name").fill("fresh")
        page.get_by_label("Endpoint").fill(callee.url("/ok"))
        confirm(page, "Store")
        heading(page, "fresh")
        press(page, "Edit")
        page.get_by_label("Concurrency").fill("7")
        confirm(page, "Store")
        expect(page.locator(".facts")).to_contain_text("Concurrency7")
        press(page, "Pause")
        told(page, "Paused")
        press(page, "Test call")
        page.get_by_label("Payload").fill('{"a": 1}')
        confirm(page, "Call it")
        expect(page.get_by_role("dialog")).to_contain_text("finish")
        confirm(page, "Close")
        press(page, "Resume")
        told(page, "Resumed")
        press(page, "Delete")
        confirm(page, "Delete")
        heading(page, "Services")
        assert server.get("/v1/services/fresh").status == 404

    def test_errors_are_grouped(self, page, server):
        again = server.submit("broken", delay=0)["id"]
        server.task_in(again, "failed")
        page.go("services/broken")
        expect(page.locator(".stack li").first).to_contain_text("2 tasks")
        expect(page.locator(".stack li pre").first).to_contain_text("500")

    def test_a_refused_change_says_why(self, page):
        page.go("services")
        press(page, "New service")
        page.get_by_label("Name").fill("wrong name")
        page.get_by_label("Endpoint").fill("http://127.0.0.1:9/")
        confirm(page, "Store")
        expect(page.get_by_role("alert").last).to_contain_text("name must be")


class TestOthers:
    def test_schedules_show_their_next_firings(self, page, server):
        page.go("schedules")
        page.get_by_role("link", name="nightly").click()
        heading(page, "nightly")
        expect(page.locator(".timeline li")).to_have_count(12)
        press(page, "Pause")
        told(page, "Paused")
        page.go("schedules")
        press(page, "New schedule")
        page.get_by_label("Name").fill("often")
        page.get_by_label("Service").fill("mail")
        page.get_by_label("Cron").fill("")
        page.get_by_label("Or every").fill("3600")
        confirm(page, "Store")
        heading(page, "often")
        press(page, "Delete")
        confirm(page, "Delete")
        heading(page, "Schedules")

    def test_the_key_of_a_firing_leads_to_its_schedule(self, page):
        page.go("schedules")
        script = """async (key) => {
            const { keyOf } = await import(new URL("static/tasks.js", document.baseURI));
            return keyOf({ key }, 60)[1].getAttribute("href");
        }"""
        for name in ("nightly", "shop/nightly"):
            assert page.evaluate(script, firing_key(name, 1)) == "schedules/nightly"

    def test_the_cluster_page_has_the_shards_and_says_why_a_drain_fails(self, page):
        page.go("cluster")
        expect(page.locator(".shards span")).to_have_count(64)
        press(page, re.compile("^Drain"))
        confirm(page, "Drain")
        expect(page.get_by_role("alert").last).to_contain_text("one node owns every shard")

    def test_a_page_that_does_not_exist_says_so(self, page):
        page.go("tasks/" + "0" * 32)
        heading(page, "Not found")

    def test_foreign_text_is_shown_as_text(self, page, server, callee):
        callee.on("/nasty", answering(500, NASTY.encode(), content_type="text/html"))
        callee.on(
            "/echo",
            answering(
                200,
                json.dumps({"html": NASTY}, ensure_ascii=False).encode(),
                content_type="application/json",
            ),
        )
        server.service("nasty", callee.url("/nasty"), max_attempts=1)
        server.service("echo", callee.url("/echo"))
        payload = {"text": NASTY, "large": "x" * LARGE}
        failed = server.submit("nasty", payload, key=KEY, delay=0)["id"]
        finished = server.submit("echo", delay=0)["id"]
        server.task_in(failed, "failed")
        server.task_in(finished, "finished")
        for path in (f"tasks/{failed}", "tasks?service=nasty", "backlog", "services/nasty"):
            page.go(path)
            expect(page.locator("main")).to_contain_text("<img src=x onerror=")
            assert page.locator("main img").count() == 0
        page.go(f"tasks/{failed}")
        for shown in ("the first 64.0 KiB of", "</script>&amp;"):
            expect(page.locator("main")).to_contain_text(shown)
        page.go(f"tasks/{finished}")
        expect(page.get_by_label("Result")).to_contain_text("<img src=x")
        expect(page.get_by_label("Result")).to_contain_text("U+202Egnp.exe")
        assert page.title().endswith("tickwheel")
        for command in (
            ["show", failed, "--attempts"], ["show", finished], ["list"], ["backlog", "list"],
            ["show", failed, "--json"],
        ):  # fmt: skip
            shown = on_terminal(server, *command)
            assert "\x1b" not in shown
            assert "\u202e" not in shown
        assert len(shown) > LARGE

    def test_a_name_with_markup_is_refused(self, server):
        body = {"protocol": "http", "endpoint": "http://127.0.0.1:9/"}
        server.put("/v1/services/%3Cimg%20src%3Dx%3E", body, status=422)


def on_terminal(server, *command):
    """Return what a command prints, as a table unless it says otherwise."""
    form = [] if "--json" in command else ["--table"]
    ran = subprocess.run(
        [sys.executable, "-m", "tickwheel", *command, *form, "--server", server.url],
        capture_output=True, text=True, check=True, timeout=WATCHDOG,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    return ran.stdout


class TestAccess:
    def test_sign_in_rights_and_sign_out(self, browser, tmp_path, callee):
        with (
            Served(
                "--store", f"sqlite:///{tmp_path}/tasks.db", "--allow-private-targets", cwd=tmp_path
            ) as own,
            opened(browser, own.url) as page,
        ):
            page.go("tokens")
            press(page, "New token")
            page.get_by_label("Name", exact=True).fill("operator")
            confirm(page, "Create")
            admin = page.get_by_label("Token", exact=True).inner_text()
            confirm(page, "Done")
            heading(page, "Sign in")
            page.get_by_label("Token").fill("tw_000000000000_" + "x" * 43)
            press(page, "Sign in")
            expect(page.get_by_role("alert")).to_contain_text("unknown")
            page.get_by_label("Token").fill(admin)
            press(page, "Sign in")
            heading(page, "Tokens")
            expect(page.locator("#top")).to_contain_text("operator")
            cookies = page.context.cookies(f"{own.url}/v1/session")
            assert [(one["httpOnly"], one["sameSite"], one["path"]) for one in cookies] == [
                (True, "Strict", "/v1")
            ]
            own.service("mail", callee.url("/ok"), token=admin, enabled=False)
            task = own.submit("mail", token=admin)["id"]
            reader = own.post(
                "/v1/tokens",
                {"name": "r", "scopes": ["read"], "namespace": "*"},
                token=admin,
                status=201,
            ).json
            page.go(f"tasks/{task}")
            press(page, "Run now")
            told(page, "due now")
            page.go("audit")
            expect(page.locator("tbody")).to_contain_text("token.create")
            press(page, "Sign out")
            page.go("sign-in")  # where the lab sends a reader
            page.get_by_label("Token").fill(reader["token"])
            press(page, "Sign in")
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


class TestTheLab:
    def test_it_shows_every_worked_example_where_the_documents_put_it(self, page):
        for text, at, path in WORKED:
            page.go(f"lab?{text}&at={at}")
            row = page.locator('tr[data-entry="A"]')
            places = [f"{level}:{slot}" if level else "buffer" for _, level, slot in path]
            expect(row.locator(".path")).to_have_text(" → ".join(places))
            if row.locator(".pill").inner_text() == "pending":
                where = row.locator("td[data-level]")
                expect(where).to_have_attribute("data-level", str(path[-1][1]))
                expect(where).to_have_attribute("data-slot", str(path[-1][2]))

    def test_an_entry_is_added_stepped_through_and_cancelled(self, page):
        page.go("lab?kind=wheel&size=20")
        page.get_by_label("Delay").fill("450")
        press(page, "Add")
        row = page.locator('tr[data-entry="A"]')
        expect(row.locator(".path")).to_have_text("3:1")
        press(page, "To the next moment")
        expect(row.locator(".path")).to_have_text("3:1 → 2:2")
        page.get_by_label("Time of the scene").fill("441")
        expect(row.locator(".path")).to_have_text("3:1 → 2:2 → 1:10")
        press(page, "Cancel A")
        expect(row.locator(".pill")).to_have_text("cancelled")
        page.reload()  # the link reproduces the scene
        expect(row.locator(".pill")).to_have_text("cancelled")

    def test_it_runs_by_itself_to_the_end(self, page):
        page.go("lab?kind=wheel&size=20&do=0:add:450")
        page.get_by_label("Speed").select_option("2000")
        press(page, "Run")
        expect(page.locator('tr[data-entry="A"] .pill')).to_have_text("fired")
        expect(page.locator(".compare tbody tr").first).to_have_text(re.compile("Precise.*3.*0"))

    def test_presets_show_the_idle_ring_and_the_purgatory(self, page):
        page.go("lab")
        press(page, "Idle connections")
        expect(page.locator("svg .dot")).to_have_count(3)
        press(page, "Purgatory")
        expect(page.locator(".operation")).to_have_count(2)

    def test_an_invalid_link_says_what_is_wrong(self, page):
        page.go("lab?kind=wheel&do=0:fly:1")
        told(page, "TIME:add:NUMBER")


PAGES = [
    "",
    "tasks?service=broken",
    "backlog",
    "services",
    "services/broken",
    "schedules",
    "schedules/nightly",
    "cluster",
    "tokens",
    "audit",
    "lab",
]


def test_nothing_serious_for_people_with_disabilities(browser, server):
    with opened(browser, server.url) as page:
        for path in [*PAGES, f"tasks/{server.failed}"]:
            page.emulate_media(color_scheme="light")
            page.go(path)
            expect(page.locator("main .card").first).to_be_visible()
            if path == "":
                expect(page.locator("main tbody tr").first).to_be_visible()
            page.evaluate(AXE_SCRIPT)
            assert serious_problems(page) == [], path
            page.emulate_media(color_scheme="dark")  # which changes colours, and nothing else
            assert serious_problems(page, runOnly=["color-contrast"]) == [], path


def serious_problems(page, **options):
    """Return what axe-core finds on a page, without what is moderate or minor.

    It looks at the first three of many equal parts: each costs as much as the first.
    """
    options |= {"resultTypes": ["violations"], "preload": False}
    exclude = [
        f"{each}:nth-child(n+4)" for each in ("tbody tr", ".heat-strip span", ".shards span")
    ]
    found = page.evaluate(
        "([exclude, options]) => axe.run({ exclude }, options)", [exclude, options]
    )["violations"]
    return [
        (one["id"], node["html"][:150], node["any"][0]["message"] if node["any"] else "")
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


def test_on_a_phone_no_page_is_wider_than_the_screen(browser, server):
    with opened(browser, server.url, viewport=PHONE, is_mobile=True, has_touch=True) as page:
        for path in [*PAGES, f"tasks/{server.failed}"]:
            page.go(path)
            expect(page.locator("main .card").first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path
            if path != "lab":
                expect(page.get_by_role("link", name="Overview")).to_be_visible()


def test_the_keyboard_reaches_the_content_and_opens_a_task(browser, server):
    with opened(browser, server.url) as page:
        page.go("tasks")
        expect(page.locator("tbody tr").first).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.get_by_text("Skip to the content")).to_be_focused()
        page.keyboard.press("Enter")
        link = page.locator("tbody a.mono").first
        link.focus()
        page.keyboard.press("Enter")
        expect(page.locator(".timeline")).to_be_visible()

"""The dashboard in a real browser over a real server: every page, every action, no console error.

Needs Debian's chromium-headless-shell. One browser serves all tests of this module; each has its
own profile. Nothing here runs an event loop: the browser's driver has one in this thread.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from receivers import answering
from scenes.worked import ROUNDS, WAKEUPS, WORKED
from tickwheel.durable import Scheduler, State
from tickwheel.values.schedule import firing_key
from web.browsing import (
    check_accessibility,
    confirm,
    elsewhere,
    expects,
    heading,
    opened,
    press,
    told,
)
from web.conftest import TRACEBACK
from web.serving import Served

WATCHDOG = 240.0
NASTY = '<img src=x onerror="document.title=1">\u202egnp.exe\x1b[31mred\U0001f480</script>&amp;'
PHONE = {"width": 390, "height": 844}
LARGE = 10_000_000
KEY = '<img src=x onerror="document.title=1"> \u05e9\u05dc\u05d5\u05dd \U0001f480'
FUNCTION = f"{KEY} ?#%2F"  # a service of a function may have such a name


@pytest.fixture(scope="module")
def server(tmp_path_factory, callee):
    """A server with something of each kind."""
    path = tmp_path_factory.mktemp("browser")
    url = f"sqlite:///{path}/tasks.db"
    options = ["--allow-private-targets", "--max-payload", "12MiB"]
    hostile = elsewhere(asyncio.run, run_hostile_function(url))
    with Served("--store", url, *options, cwd=path) as server:
        server.hostile = hostile
        server.service("mail", callee.url("/ok"))
        server.service("broken", callee.url("/bad"), max_attempts=2, backoff={"first": 0.01})
        server.service("off", callee.url("/ok"), enabled=False)
        server.put("/v1/schedules/nightly", {"service": "mail", "cron": "0 3 * * *"}, status=201)
        for delay in (900, 1_800, 2_700):  # before the first count of due times, which is kept
            server.submit("off", delay=delay, key=f"by-keyboard-{delay}")
        server.failed = server.submit("broken", delay=0)["id"]
        server.task_in(server.failed, "failed")
        yield server


async def run_hostile_function(url):
    """Let a function fail with foreign text; return the id of its task."""
    async with Scheduler(url) as app:

        @app.task(name=FUNCTION, max_attempts=1)
        async def fail():
            raise ValueError(f"{NASTY}\n{'x' * LARGE}\nlast line: {NASTY}")

        task = await fail.submit()
        while (await app.get(task.id)).state != State.FAILED:
            await asyncio.sleep(0.005)
    return task.id


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
        for days, number in ((-1, 0), (2, 1)):
            press(page, "Clear")
            page.get_by_label("Due from").fill(f"{due - timedelta(days=2):%Y-%m-%dT%H:%M:%S}")
            page.get_by_label("Due before").fill(f"{due + timedelta(days):%Y-%m-%dT%H:%M:%S}")
            page.get_by_label("Service").fill("off")
            press(page, "Search")
            expect(page.locator("tbody tr" if number else ".empty")).to_have_count(1)
        page.get_by_label("Id or key").fill(other["id"])
        press(page, "Search")
        heading(page, other["id"])

    def test_a_list_has_pages_and_offers_what_is_new(self, page, server):
        many = [{"service": "off", "delay": 86_400, "tags": ["paged"]}] * 51
        server.post("/v1/tasks/batch", many, status=200)
        page.go("")
        waiting = page.locator(".figure").filter(has_text="On the wheel").locator(".value")
        expect(waiting).to_have_text(re.compile(r"\d"))  # so that the next page knows the count
        page.get_by_role("link", name="Tasks", exact=True).click()
        page.get_by_label("Tags").fill("paged")
        press(page, "Search")
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(50)
        press(page, "Older →")
        expect(rows).to_have_count(1)
        press(page, "← Newer")
        expect(rows).to_have_count(50)
        server.submit("off", delay=86_400, tags=["paged"], key="newest")
        press(page, "Show newer tasks")
        expect(rows.first).to_contain_text("newest")

    def test_a_task_tells_its_life_with_errors(self, page, server):
        page.go(f"tasks/{server.failed}")
        expect(page.locator(".timeline li")).to_have_count(3)
        expect(page.locator(".timeline")).to_contain_text("Attempt 2")
        expect(page.locator(".timeline")).to_contain_text("failed for good")
        expect(page.locator(".timeline pre").first).to_contain_text("500")

    def test_a_task_that_is_tried_again_tells_its_traceback_and_its_next_attempt(
        self, page, server, callee
    ):
        server.service(
            "accepts", callee.url("/accepted"), backoff={"first": 7200, "max": 7200, "jitter": 0}
        )
        task = server.submit("accepts", delay=0)["id"]
        server.task_in(task, "running")
        page.go(f"tasks/{task}")
        life = page.locator(".timeline li")
        expect(life.last).to_contain_text("Attempt 1 is running")
        feedback = {"outcome": "failed", "attempt": 1, "error": TRACEBACK}
        server.post(f"/v1/tasks/{task}/feedback", feedback, status=200)
        expect(page.get_by_label("Error of attempt 1")).to_have_text(TRACEBACK)
        expect(page.get_by_label("Last error")).to_have_text(TRACEBACK)
        expect(life.last).to_contain_text("Next attempt")
        expect(life.last).to_contain_text("in 2 h")
        press(page, "Cancel")
        confirm(page, "Cancel the task")
        expect(life.last).to_contain_text("Cancelled")

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
        everything = page.get_by_label("Select all tasks of this page")
        everything.check()
        press(page, "Reschedule 5")
        due = (datetime.now(UTC) + timedelta(days=2)).astimezone().replace(microsecond=0)
        page.get_by_label("Or at a time").fill(f"{due:%Y-%m-%dT%H:%M:%S}")
        confirm(page, "Reschedule")
        told(page, "Reschedule: 5 of 5 tasks")
        found = server.get("/v1/tasks?tag=bulk").json["items"]
        assert {datetime.fromisoformat(task["due_at"]) for task in found} == {due}
        expect(everything).not_to_be_checked()
        everything.check()
        press(page, "Run now 5")
        confirm(page, "Run now 5 tasks")
        told(page, "Run now: 5 of 5 tasks")
        expect(everything).not_to_be_checked()
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
        expect(page.locator("tbody tr")).to_have_count(5)
        for box in page.get_by_label("Select the task").all()[:2]:
            box.check()
        press(page, "Replay 2")
        confirm(page, "Replay 2 tasks")
        told(page, "Replay: 2 of 2 tasks")
        press(page, "Replay all that match …")
        confirm(page, "Replay 3 tasks")
        told(page, "Replay: 3 tasks")
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
        expect(page.get_by_role("dialog")).to_contain_text("finished")
        expect(page.get_by_role("dialog").get_by_role("button")).to_have_text(["Close"])
        confirm(page, "Close")
        press(page, "Resume")
        told(page, "Resumed")
        press(page, "Delete")
        confirm(page, "Delete")
        heading(page, "Services")
        assert server.get("/v1/services/fresh").status == 404

    def test_a_test_call_of_a_service_that_is_gone_says_so(self, page, server, callee):
        server.service("left", callee.url("/gone"))
        page.go("services/left")
        press(page, "Test call")
        confirm(page, "Call it")
        expect(page.get_by_role("dialog")).to_contain_text("released")
        expect(page.get_by_role("dialog")).to_contain_text("gone for good")

    def test_errors_are_grouped(self, page, server):
        again = server.submit("broken", delay=0)["id"]
        server.task_in(again, "failed")
        page.go("services/broken")
        expect(page.locator(".stack li").first).to_contain_text("2 tasks")
        expect(page.locator(".stack li pre").first).to_contain_text("500")

    def test_a_refused_change_says_why(self, page):
        expects(page, 422)
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

    def test_a_drained_node_gives_its_shards_away_and_gets_them_back(
        self, browser, tmp_path, postgres_url
    ):
        options = ("--store", postgres_url)
        with (
            Served(*options, "--node", "first", cwd=tmp_path) as server,
            Served(*options, "--node", "second", cwd=tmp_path),
            opened(browser, server.url) as page,
        ):
            page.go("cluster")
            owned = {one: page.locator(f"[data-owner={one}]") for one in ("first", "second")}
            state = page.get_by_role("row").filter(has_text="second").locator(".pill")
            expect(owned["first"]).to_have_count(32)
            expect(owned["second"]).to_have_count(32)
            press(page, "Drain second")
            confirm(page, "Drain")
            told(page, "Its shards move away")
            expect(state).to_have_text("drained")
            expect(owned["first"]).to_have_count(64)
            expect(page.locator(".shards .moved")).to_have_count(32)
            press(page, "Undrain second")
            confirm(page, "Undrain")
            told(page, "Its shards come back")
            expect(state).to_have_text("active")
            expect(owned["second"]).to_have_count(32)
            page.close()

    def test_the_cluster_page_has_the_shards_and_says_why_a_drain_fails(self, page):
        expects(page, 409)
        page.go("cluster")
        expect(page.locator(".shards span")).to_have_count(64)
        press(page, re.compile("^Drain"))
        confirm(page, "Drain")
        expect(page.get_by_role("alert").last).to_contain_text("one node owns every shard")

    def test_a_page_that_does_not_exist_says_so(self, page):
        expects(page, 404)
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
        server.service("hears", callee.url("/accepted"))
        payload = {"text": NASTY, "large": "x" * LARGE}
        failed = server.submit("nasty", payload, key=KEY, delay=0)["id"]
        finished = server.submit("echo", delay=0)["id"]
        large = server.submit("hears", delay=0)["id"]
        server.task_in(large, "running")
        result = {"outcome": "finished", "attempt": 1, "result": NASTY + "x" * LARGE}
        server.post(f"/v1/tasks/{large}/feedback", result, status=200)
        server.task_in(failed, "failed")
        server.task_in(finished, "finished")
        for path in (
            f"tasks/{failed}", "tasks?service=nasty", "backlog", "services/nasty",
            f"tasks/{server.hostile}", f"tasks/{large}",
        ):  # fmt: skip
            page.go(path)
            expect(page.locator("main")).to_contain_text("<img src=x onerror=")
            assert page.locator("main img").count() == 0
        page.go(f"tasks/{failed}")
        for shown in ("the first 64.0 KiB of", "</script>&amp;"):
            expect(page.locator("main")).to_contain_text(shown)
        page.go(f"tasks/{large}")
        expect(page.locator("main")).to_contain_text("the first 64.0 KiB of 9.5 MiB")
        page.go(f"tasks/{server.hostile}")
        error = page.get_by_label("Last error")
        for shown in (
            "Traceback (most recent call last)", "U+202Egnp.exeU+001B[31mred\U0001f480</script>",
            "…", "last line: <img src=x",
        ):  # fmt: skip
            expect(error).to_contain_text(shown)
        assert len(error.inner_text()) < LARGE / 100
        expect(page.get_by_role("link", name=FUNCTION)).to_be_visible()
        page.go(f"tasks/{finished}")
        expect(page.get_by_label("Result")).to_contain_text("<img src=x")
        expect(page.get_by_label("Result")).to_contain_text("U+202Egnp.exe")
        assert page.title().endswith("tickwheel")
        for command in (
            ["show", failed, "--attempts"], ["show", finished], ["list"], ["backlog", "list"],
            ["show", server.hostile, "--attempts"], ["show", large],
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


class TestTheLab:
    def test_it_shows_every_worked_example_where_the_documents_put_it(self, page):
        entry = page.locator('tr[data-entry="A"]')
        where = entry.locator("td[data-level]")
        for text, path, due in WORKED:
            page.go(f"lab?{text}&at={path[0][0]}")
            places = []
            for at, level, slot in path:
                move_to(page, at)
                places.append(f"{level}:{slot}" if level else "buffer")
                expect(entry.locator(".path")).to_have_text(" → ".join(places))
                expect(where).to_have_attribute("data-level", str(level))
                expect(where).to_have_attribute("data-slot", str(slot))
            move_to(page, due)
            expect(entry.locator(".pill")).to_have_text("fired")
            expect(page.locator(".log li").first).to_have_text(f"{due:,}firedA")
            expect(entry.locator(".path")).to_have_text(" → ".join(places))

    def test_it_counts_rounds_and_wake_ups_and_refuses_what_does_not_fit(self, page):
        for delay, rounds in ROUNDS:
            page.go(f"lab?kind=rounds&size=8&do=0:add:{delay}")
            expect(page.locator("tr[data-entry] .path")).to_have_text(f"1:{delay % 8}")
            left = page.get_by_text("1 round left")
            expect(left).to_have_count(rounds)
        for delay, wakeups in WAKEUPS:
            page.go(f"lab?kind=wheel&size=20&do=0:add:{delay}&at={delay}")
            rows = page.locator(".compare tbody tr")
            expect(rows.first).to_have_text(f"Precise{wakeups}0")
            expect(rows.last).to_have_text(f"Ticking{delay}{delay - wakeups}")
        page.go("lab?kind=simple&size=20&do=2:add:22&at=2")
        expect(page.locator("tr[data-entry] .pill")).to_have_text("refused")
        expect(page.locator("tr[data-entry] .path")).to_contain_text("24")
        page.go("lab?kind=idle&timeout=30&do=0:packet:ann&at=29")
        user = page.get_by_role("row").filter(has_text="ann")
        expect(user).to_contain_text("online")
        press(page, "One unit of time on")
        expect(user).to_contain_text("offline at 30")

    def test_each_kind_of_scene_is_chosen_shaped_and_played(self, page):
        page.go("lab")
        kind = page.get_by_label("Kind")
        page.get_by_label("Levels").select_option("fixed")
        page.get_by_label("Sizes").fill("4.4")
        press(page, "Apply")
        page.get_by_label("Pointers").select_option("pushed")
        page.get_by_label("Overflow").select_option("memory")
        page.get_by_label("Delay").fill("20")
        press(page, "Add")
        expect(page.locator("tr[data-entry] .path").last).to_have_text("buffer")
        for part in ("sizes=4.4", "pointers=pushed", "overflow=memory"):
            assert part in page.url
        page.get_by_label("Levels").select_option("demand")
        expect(page.get_by_label("Size", exact=True)).to_have_value("20")
        kind.select_option("rounds")
        expect(page.get_by_label("Levels")).to_have_count(0)
        kind.select_option("idle")
        press(page, "Packet")
        user = page.get_by_role("row").filter(has_text="dan")
        expect(user).to_contain_text("online")
        page.get_by_label("Silent seconds").fill("2")
        press(page, "Apply")
        press(page, "One unit of time on")
        expect(page.get_by_label("Time", exact=True)).to_have_text("t = 1")
        press(page, "One unit of time on")
        expect(user).to_contain_text("offline at 2")
        kind.select_option("purgatory")
        press(page, "Wait")
        operation = page.locator(".operation")
        expect(operation).to_contain_text("0 of 2 events on orders")
        press(page, "Event")
        expect(operation).to_contain_text("1 of 2 events on orders")
        press(page, "Event")
        expect(operation.locator(".pill")).to_have_text("completed")
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        press(page, "Copy link")
        told(page, "The link is copied")
        page.goto(page.evaluate("navigator.clipboard.readText()"))
        expect(operation.locator(".pill")).to_have_text("completed")

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
        expects(page, 422)
        page.go("lab?kind=wheel&do=0:fly:1")
        told(page, "TIME:add:NUMBER")


def move_to(page, time):
    page.get_by_label("Time of the scene").fill(str(time))


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
SCENES = [
    "lab?kind=simple&size=20&do=2:add:8,2:add:22&at=2",
    "lab?kind=rounds&size=8&do=0:add:10",
    "lab?kind=idle&do=0:packet:ann,30:packet:bob&at=30",
    "lab?kind=purgatory&do=0:wait:orders:2:10,1:event:orders&at=1",
]


def shown(page, path):
    """Open a page, and wait until it shows something."""
    page.go(path)
    expect(page.locator("main .card").first).to_be_visible()
    if path == "":
        expect(page.locator("main tbody tr").first).to_be_visible()


def test_nothing_serious_for_people_with_disabilities(browser, server):
    with opened(browser, server.url) as page:
        for path in [*PAGES, *SCENES, f"tasks/{server.failed}"]:
            shown(page, path)
            check_accessibility(page, dark=path not in SCENES)  # which have the lab's colours


def test_on_a_phone_no_page_is_wider_than_the_screen(browser, server):
    with opened(browser, server.url, viewport=PHONE, is_mobile=True, has_touch=True) as page:
        for path in [*PAGES, f"tasks/{server.failed}"]:
            shown(page, path)
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path
            if path != "lab":
                expect(page.get_by_role("link", name="Overview")).to_be_visible()
            check_accessibility(page, dark=False)  # the colours are those of a wide screen


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

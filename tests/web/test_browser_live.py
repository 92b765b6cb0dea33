"""What the pages keep, count and say, in a real browser: history, namespaces, partial figures."""

import asyncio
import json
import re

import pytest
from playwright.sync_api import expect

from tickwheel.durable import Scheduler, State
from web.browsing import confirm, elsewhere, expects, heading, opened, press, told
from web.serving import Served

WATCHDOG = 240.0
CUT = """async () => {
  const { live } = await import("./static/live.js");
  live.stop();
  return live.last.figures.at;
}"""
ARRIVED = """async (found) => {
  const { live } = await import("./static/live.js");
  live.last.figures = found;
  live.dispatchEvent(new CustomEvent("figures", { detail: found }));
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory, callee):
    path = tmp_path_factory.mktemp("live")
    options = ["--allow-private-targets", "--store", f"sqlite:///{path}/tasks.db"]
    with Served(*options, cwd=path) as server:
        server.service("mail", callee.url("/ok"))
        server.service("off", callee.url("/ok"), enabled=False)
        yield server


@pytest.fixture
def page(browser, server):
    with opened(browser, server.url) as page:
        yield page


def stream(page, **messages):
    """Answer each stream with these messages."""
    events = "".join(
        f"event: {name}\ndata: {json.dumps(value)}\n\n" for name, value in messages.items()
    )
    page.route(
        "**/v1/live*", lambda route: route.fulfill(content_type="text/event-stream", body=events)
    )


def figures(server, **more):
    """Return a message of the figures of the cluster, with other values in `stats`."""
    stats = server.get("/v1/stats?scope=cluster", status=200).json
    lateness = {"p50": None, "p90": None, "p99": None}
    return {"at": 1e12, "rates": {}, "lateness": lateness, "stats": stats | more}


class TestOverview:
    def test_the_history_of_the_charts_grows_while_other_pages_are_shown(self, page):
        page.go("")
        expect(page.locator(".figure").first.locator(".value")).not_to_have_text("–")
        page.get_by_role("link", name="Services").click()
        heading(page, "Services")
        page.evaluate("import('./static/live.js').then(({ live }) => { window.live = live; })")
        rows = "live.last.history.rows.length"
        page.wait_for_function(f"least => {rows} >= least", arg=page.evaluate(rows) + 2)

    def test_tasks_that_wait_for_a_permit_are_not_on_the_wheel(self, page, server):
        stream(page, figures=figures(server, held=10, waiting=7))
        page.go("")
        tile = page.locator(".figure").filter(has_text="On the wheel").locator(".value")
        expect(tile).to_have_text("3")

    def test_figures_that_lack_a_node_say_so(self, page, server):
        nodes = [{"name": "a", "error": None}, {"name": "b", "error": "it did not answer"}]
        stream(page, figures=figures(server, by_node=nodes))
        page.go("")
        banner = page.get_by_text("Figures of 1 of 2 nodes: b: it did not answer")
        expect(banner).to_be_visible()

    def test_one_namespace_has_no_totals_of_others(self, page, server):
        page.go("")
        expect(page.get_by_role("heading", name="The wheels")).to_be_visible()
        press(page, "default")
        page.get_by_label("Show the tasks of this namespace").fill("shop")
        confirm(page, "Use it")
        expect(page.get_by_role("heading", name="The wheels")).to_have_count(0)
        expect(page.locator(".figure .label")).to_have_text(["Submitted", "Waiting", "Running"])
        submitted = page.locator(".figure").first
        expect(submitted).to_contain_text("0 since the start")
        server.submit("off", delay=3_600)
        shop = {"headers": {"tickwheel-namespace": "shop"}}
        server.put("/v1/services/sale", {"endpoint": "http://127.0.0.1:9/"}, **shop, status=201)
        server.post("/v1/tasks", {"service": "sale", "delay": 3600}, **shop, status=201)
        expect(submitted).to_contain_text("1 since the start")

    def test_a_moved_shard_is_outlined_where_nothing_moves(self, page):
        nodes = [{"name": name, "state": "active", "shards": 1, "started_at": None}
                 for name in "ab"]  # fmt: skip
        page.go("cluster")
        expect(page.locator(".shards span").first).to_be_visible()
        page.evaluate(CUT)
        page.evaluate(
            """async (nodes) => {
              const { live } = await import("./static/live.js");
              const send = (owners) => live.dispatchEvent(
                new CustomEvent("cluster", { detail: { nodes, owners } }));
              send(["a", "b"]);
              send(["b", "b"]);
            }""",
            nodes,
        )
        moved = page.locator(".shards span").first
        expect(moved).to_have_class(re.compile("moved"))
        assert "3px" in moved.evaluate("element => getComputedStyle(element).boxShadow")

    def test_the_levels_of_the_wheels_end_with_their_card(self, page):
        """A taller neighbour leaves the same space above and below the rings, none at the end."""
        page.set_viewport_size({"width": 1120, "height": 900})
        page.go("")
        expect(page.locator(".ring-legend li").first).to_be_visible()
        expect(page.locator(".heat-strip span").first).to_be_visible()
        head, card, rings, levels = page.locator(".rings").evaluate("""(rings) => {
          const parts = [rings.previousElementSibling, rings.parentElement, ...rings.children];
          return parts.map((part) => part.getBoundingClientRect().toJSON());
        }""")
        above = rings["top"] - head["bottom"] - 12  # the margin of the head
        below = levels["top"] - rings["bottom"] - 14  # the gap
        assert above == pytest.approx(below, abs=1)
        assert above > 20  # the neighbour is taller indeed
        assert card["bottom"] - levels["bottom"] == pytest.approx(17, abs=1)  # padding and border


class TestTasks:
    def test_newer_tasks_of_another_namespace_are_not_offered(self, page, server):
        page.go("tasks")
        heading(page, "Tasks")
        expect(page.locator("tbody tr").first).to_be_visible()
        page.evaluate(CUT)
        found = figures(server)
        newer = page.get_by_role("button", name="Show newer tasks")
        page.evaluate(ARRIVED, found)
        found["stats"]["submitted"] += 1
        page.evaluate(ARRIVED, found)
        expect(newer).to_be_hidden()
        found["stats"]["submitted_here"] += 1
        page.evaluate(ARRIVED, found)
        expect(newer).to_be_visible()

    def test_times_from_now_go_on(self, page, server):
        server.submit("off", delay=100_000, key="in-a-day")
        page.clock.install()
        page.go("tasks?key=in-a-day")
        due = page.locator("tbody time.ago").first
        expect(due).to_have_text("in 27.8 h")
        page.clock.fast_forward(7_200_000)
        expect(due).to_have_text("in 25.8 h")

    @pytest.mark.parametrize("action", ["Cancel", "Replay"])
    def test_blanks_around_a_tag_match_nothing_less(self, page, server, action):
        tag = f"padded-{action.lower()}"
        tasks = [server.submit("off", tags=[tag])["id"] for _ in range(2)]
        filters = f"tag=%20{tag},%20"
        if action == "Replay":
            for task in tasks:
                server.post(f"/v1/tasks/{task}/cancel", status=200)
            filters += "&state=cancelled"
        page.go(f"{'tasks' if action == 'Cancel' else 'backlog'}?{filters}")
        expect(page.locator("tbody tr")).to_have_count(2)
        press(page, f"{action} all that match …")
        confirm(page, f"{action} 2 tasks")
        told(page, f"{action}: 2 tasks")

    def test_a_filter_of_blanks_matches_everything_and_offers_no_bulk_action(self, page, server):
        server.submit("off")
        page.go("tasks?tag=%20")
        expect(page.locator("tbody tr").first).to_be_visible()
        expect(page.get_by_role("button", name="Cancel all that match …")).to_have_count(0)

    def test_a_task_shows_its_newest_attempts_and_leads_to_the_others(self, page, server, callee):
        options = {"max_attempts": 115, "backoff": {"first": 0}, "breaker": None}
        server.service("stubborn", callee.url("/bad"), **options)
        task = server.submit("stubborn", delay=0)["id"]
        server.task_in(task, "failed")
        page.go(f"tasks/{task}")
        life = page.locator(".timeline")
        rows = life.locator("li .what b").filter(has_text="Attempt")
        for button, first, last in (
            (None, 16, 115), ("Earlier attempts", 1, 100), ("Later attempts", 101, 115),
            ("Earlier attempts", 86, 115),
        ):  # fmt: skip
            if button:
                press(page, button)
            expect(rows).to_have_count(last - first + 1)
            expect(rows.first).to_have_text(f"Attempt {first}")
            expect(rows.last).to_have_text(f"Attempt {last}")
            expect(page.locator(".card").first).to_contain_text(f"attempts {first} to {last}")

    def test_where_long_errors_fill_an_answer_the_newest_attempts_are_shown(
        self, browser, tmp_path
    ):
        url = f"sqlite:///{tmp_path}/tasks.db"
        task = elsewhere(asyncio.run, failed_with_long_errors(url, 25))
        with Served("--store", url, cwd=tmp_path) as own, opened(browser, own.url) as page:
            page.go(f"tasks/{task}")
            rows = page.locator(".timeline li .what b").filter(has_text="Attempt")
            expect(rows.last).to_have_text("Attempt 25")
            expect(page.get_by_role("button", name="Later attempts")).to_have_count(0)
            first = int(rows.first.inner_text().removeprefix("Attempt "))
            assert first > 1
            press(page, "Earlier attempts")
            expect(rows.first).to_have_text(f"Attempt {max(1, first - (26 - first))}")
            page.close()

    def test_all_tasks_of_the_page_can_be_selected_on_a_phone(self, browser, server):
        server.submit("off", delay=3_600)
        with opened(browser, server.url, viewport={"width": 390, "height": 844}) as page:
            page.go("tasks")
            page.get_by_label("Select all tasks of this page").click()
            expect(page.locator(".selection")).to_contain_text("selected")

    def test_after_a_bulk_action_the_list_begins_at_its_first_page(self, page, server):
        server.service("many", enabled=False)
        for _ in range(60):
            server.submit("many", delay=3_600)
        page.go("tasks?service=many")
        press(page, "Older →")
        expect(page.locator("tbody tr")).to_have_count(10)
        press(page, "Cancel all that match …")
        confirm(page, "Cancel 60 tasks")
        told(page, "Cancel: 60 tasks")
        expect(page.locator("tbody tr")).to_have_count(50)
        expect(page.get_by_role("button", name="← Newer")).to_be_disabled()

    def test_a_replay_of_all_that_match_says_that_it_means_the_failed_ones(self, page, server):
        task = server.submit("off", delay=3_600, key="once")["id"]
        server.post(f"/v1/tasks/{task}/cancel", status=200)
        page.go("backlog?key=once")
        press(page, "Replay all that match …")
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("0 failed tasks match these filters now")


async def failed_with_long_errors(url, attempts):
    """Let a function fail this often; return the id of its task."""
    async with Scheduler(url) as app:

        @app.task(name="verbose", max_attempts=attempts, backoff=0)
        async def fail():
            raise ValueError("x" * 20_000)

        task = await fail.submit()
        while (await app.get(task.id)).state != State.FAILED:
            await asyncio.sleep(0.005)
    return task.id


class TestServices:
    def test_a_service_with_headers_moves_to_another_origin(self, page, server, callee):
        server.service("moving", "http://127.0.0.1:9/", headers={"x-key": "old", "x-other": "1"})
        page.go("services/moving")
        press(page, "Edit")
        headers = page.get_by_label("Headers, one in a line")
        expect(headers).to_have_value("x-key: ********\nx-other: ********")
        page.get_by_label("Endpoint").fill(callee.url("/ok"))
        headers.fill("x-key: new")
        confirm(page, "Store")
        expect(page.locator(".facts")).to_contain_text(callee.url("/ok"))
        press(page, "Test call")
        confirm(page, "Call it")
        expect(page.get_by_role("dialog")).to_contain_text("finish")
        assert callee.requests[-1].header("x-key") == "new"
        assert callee.requests[-1].header("x-other") is None

    def test_each_field_of_a_service_is_stored(self, page, server):
        page.go("services")
        press(page, "New service")
        page.get_by_label("Name").fill("whole")
        page.get_by_label("Protocol").fill("grpc")
        page.get_by_label("Endpoint").fill("grpc://127.0.0.1:9")
        page.get_by_text("Breaker, backoff and feedback").click()
        given = {"longest pause": 90, "probes": 3, "factor": 4, "jitter": 0.5, "Feedback": 60}
        for label, value in given.items():
            page.get_by_label(label).fill(str(value))
        confirm(page, "Store")
        heading(page, "whole")
        found = server.get("/v1/services/whole").json
        assert (found["protocol"], found["feedback_timeout"]) == ("grpc", 60)
        assert (found["backoff"]["factor"], found["backoff"]["jitter"]) == (4, 0.5)
        assert (found["breaker"]["max_pause"], found["breaker"]["probes"]) == (90, 3)

    def test_a_pause_and_an_edit_keep_delays_and_no_timeout(self, page, server):
        given = {"backoff": {"delays": [60, 300, 3600], "jitter": 0}, "timeout": None}
        before = server.service("patient", **given)
        page.go("services/patient")
        facts = page.locator(".facts")
        expect(facts).to_contain_text("Backoff60 s, 5 min, 60 min")
        expect(facts).to_contain_text("Timeoutno limit")
        press(page, "Pause", exact=True)
        told(page, "Paused")
        press(page, "Resume", exact=True)
        told(page, "Resumed")
        press(page, "Edit")
        expect(page.get_by_label("Or these waits")).to_have_value("60, 300, 3600")
        page.get_by_label("Concurrency").fill("7")
        confirm(page, "Store")
        expect(facts).to_contain_text("Concurrency7")
        found = server.get("/v1/services/patient").json
        changed = {"concurrency": 7, **{name: found[name] for name in ("version", "updated_at")}}
        assert found == before | changed
        press(page, "Edit")
        page.get_by_label("Or these waits").fill("")
        page.get_by_label("Timeout, seconds").fill("20")
        confirm(page, "Store")
        expect(facts).to_contain_text("Backoff1 s × 2, up to 60 min")
        found = server.get("/v1/services/patient").json
        assert (found["backoff"]["delays"], found["timeout"]) == ([], 20)

    def test_options_of_messages_are_not_offered_for_celery(self, page):
        page.go("services")
        press(page, "New service")
        page.get_by_text("Breaker, backoff and feedback").click()
        protocol, confirmed = page.get_by_label("Protocol"), page.locator("[name=confirmed]")
        protocol.fill("kafka")
        confirmed.select_option("running")
        expect(page.locator("[name=cloudevents]")).to_be_visible()
        protocol.fill("celery")
        expect(page.locator("[name=cloudevents]")).to_be_hidden()
        expect(confirmed).to_be_hidden()
        expect(confirmed).to_have_value("finished")

    def test_a_page_that_is_read_again_listens_once(self, page):
        page.go("services/mail")
        heading(page, "mail")
        page.evaluate("""async () => {
          const { live } = await import("./static/live.js");
          window.listening = [];
          const add = live.addEventListener.bind(live);
          live.addEventListener = (name, listener, options) => {
            window.listening.push(options.signal);
            add(name, listener, options);
          };
        }""")
        for done in ("Paused", "Resumed", "Paused", "Resumed"):
            press(page, {"Paused": "Pause", "Resumed": "Resume"}[done], exact=True)
            told(page, done)
            next_one = {"Paused": "Resume", "Resumed": "Pause"}[done]
            expect(page.get_by_role("button", name=next_one, exact=True)).to_be_visible()
        assert page.evaluate("window.listening.filter((signal) => !signal.aborted).length") == 1


class TestLab:
    @pytest.fixture
    def lab(self, page):
        page.go("lab")
        page.get_by_role("button", name="Copy link").wait_for()
        return page

    def test_a_link_that_cannot_be_copied_is_not_said_to_be(self, lab):
        lab.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        press(lab, "Copy link")
        told(lab, "The link is this page's address")

    def test_a_run_never_steps_back(self, page):
        page.go("lab?kind=wheel&size=20&do=0:add:450&at=100")
        time = page.get_by_label("Time", exact=True)
        expect(time).to_have_text("t = 100")
        page.evaluate("void (performance.now = () => 1e9)")  # later than the time of any frame
        press(page, "Run")
        page.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        press(page, "Pause")
        press(page, "One unit of time on")
        expect(time).to_have_text("t = 101")

    def test_an_invalid_link_says_why_and_its_controls_do_no_harm(self, page):
        expects(page, 422)
        page.route("**/v1/lab/scene*", lambda route: route.fulfill(
            status=422, content_type="application/json",
            body=json.dumps({"detail": "size must be at least 2"}),
        ))  # fmt: skip
        page.go("lab?kind=wheel&size=1")
        expect(page.get_by_text("This scene cannot be shown")).to_be_visible()
        for key in ("ArrowRight", "ArrowLeft", "Home", " "):
            page.keyboard.press(key)
        press(page, "To the next moment")
        expect(page.get_by_text("size must be at least 2").first).to_be_visible()

    @pytest.mark.parametrize("status", [403, 503])
    def test_a_server_that_refuses_the_lab_is_quoted(self, page, status):
        expects(page, status)
        page.route("**/v1/lab/presets", lambda route: route.fulfill(
            status=status, content_type="application/json",
            body=json.dumps({"detail": "come back later"}),
        ))  # fmt: skip
        page.go("lab")
        expect(page.get_by_text("come back later")).to_be_visible()

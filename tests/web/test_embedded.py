"""The dashboard in other ASGI applications: mounted in FastAPI, while its scheduler runs or not."""

import asyncio
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

import tickwheel.web
from tickwheel.durable import Scheduler
from web.serving import Api, create_token


@pytest.fixture
def scheduler(sqlite_url):
    return Scheduler(sqlite_url)


def ask_mounted(scheduler, requests, *, runs=True, **options):
    """Mount the dashboard at /jobs, and return the answers to requests (target, host, options)."""
    web = FastAPI()
    web.mount("/jobs", tickwheel.web.dashboard(scheduler, **options))
    client = SimpleNamespace(app=web)

    async def ask_all():
        answers = []
        for method, target, *more in requests:
            body, headers = (*more, None, None)[:2]
            given = {"host": "127.0.0.1", **(headers or {})}
            answers.append(await Api.asked(client, method, target, body, headers=given))
        return answers

    async def with_scheduler():
        async with scheduler:
            return await ask_all()

    return asyncio.run(with_scheduler() if runs else ask_all())


def test_the_pages_and_the_api_are_below_the_mount(scheduler):
    @scheduler.task
    def greet(name):
        return name

    own = {"host": "jobs.example.com"}
    root, page, script, stats, made, elsewhere = ask_mounted(
        scheduler,
        [
            ("GET", "/jobs/"),
            ("GET", "/jobs/tasks/" + "0" * 32),
            ("GET", "/jobs/static/dashboard.js"),
            ("GET", "/jobs/v1/stats", None, own),
            ("POST", "/jobs/v1/tasks", {"service": "greet", "delay": 60}, own),
            ("GET", "/elsewhere"),
        ],
        open_access=True,
        hosts=["jobs.example.com"],
    )
    assert b'<base href="./">' in root.body
    assert b'<base href="../">' in page.body
    assert script.media == "text/javascript"
    assert [*stats.json["services"]] == ["greet"]
    assert (made.status, elsewhere.status) == (201, 404)


def test_prometheus_can_scrape_the_scheduler_below_the_mount(scheduler):
    @scheduler.task
    def greet(name):
        return name

    (answer,) = ask_mounted(scheduler, [("GET", "/jobs/metrics")], open_access=True)
    assert answer.status == 200
    families = {one.name: one for one in text_string_to_metric_families(answer.body.decode())}
    services = {one.labels.get("service") for one in families["tickwheel_service_enabled"].samples}
    assert services == {"greet"}


def test_a_foreign_host_or_origin_is_refused(scheduler):
    answers = ask_mounted(
        scheduler,
        [
            ("GET", "/jobs/v1/tasks", None, {"host": "evil.example"}),
            ("GET", "/jobs/v1/tasks", None, {"origin": "http://evil.example"}),
            ("GET", "/jobs/v1/tasks"),
        ],
        open_access=True,
    )
    assert [answer.status for answer in answers] == [403, 403, 200]


def test_by_default_it_needs_a_token(scheduler, sqlite_url):
    token = create_token(sqlite_url, "read")
    refused, signed, read = ask_mounted(
        scheduler,
        [
            ("GET", "/jobs/v1/tasks"),
            ("POST", "/jobs/v1/session", {"token": token}),
            ("GET", "/jobs/v1/tasks", None, {"cookie": f"tickwheel={token}"}),
        ],
    )
    assert (refused.status, signed.status, read.status) == (401, 200, 200)
    assert signed.headers["set-cookie"].startswith(f"tickwheel={token};")


def test_while_the_scheduler_does_not_run_it_answers_503(scheduler):
    (answer,) = ask_mounted(scheduler, [("GET", "/jobs/")], runs=False)
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")


def test_a_scheduler_that_was_restarted_is_shown(scheduler):
    web = tickwheel.web.dashboard(scheduler, open_access=True)
    client = SimpleNamespace(app=web)

    async def node():
        async with scheduler:
            answer = await Api.asked(client, "GET", "/v1/session", headers={"host": "127.0.0.1"})
            return answer.json["node"], scheduler.node.name

    for _ in range(2):
        shown, running = asyncio.run(node())
        assert shown == running


def test_the_package_has_no_other_lazy_name():
    with pytest.raises(AttributeError, match="nothing"):
        _ = tickwheel.web.nothing

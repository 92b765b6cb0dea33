"""Covers web.lab: the page and its scenes, in the service and alone."""

import asyncio
import json
import threading

import pytest

from tickwheel.scenes.presets import PRESETS
from tickwheel.web import lab
from tickwheel.web.lab import MAX_WAITING, LabApp


def ask(path, query="", method="GET"):
    """Send a request to the lab alone; return its status and its body."""
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode()}
    asyncio.run(LabApp()({**scope, "headers": []}, None, send))
    return sent[0]["status"], sent[1]["body"]


def test_the_service_serves_the_page_and_the_state_of_a_scene(api):
    assert b"static/lab.js" in api.get("/lab?do=0:add:450", status=200).body
    assert len(api.get("/v1/lab/presets", status=200).json["items"]) == len(PRESETS)
    entry = api.get("/v1/lab/scene?kind=wheel&size=20&do=0:add:450&at=401", status=200).json[
        "entries"
    ]
    assert (entry[0]["level"], entry[0]["slot"]) == (2, 2)


def test_alone_it_needs_no_service():
    for path in ("/", "/lab"):
        status, body = ask(path)
        assert (status, b"static/lab.js" in body) == (200, True)
    assert ask("/static/lab.js")[0] == 200
    status, body = ask("/v1/lab/scene", "do=0:add:5&at=5")
    assert (status, json.loads(body)["entries"][0]["state"]) == (200, "fired")


def test_a_script_that_waits_for_ever_is_answered(api):
    scene = api.get("/v1/lab/scene?kind=purgatory&do=0:wait:a:1:0", status=200).json
    assert scene["entries"][0]["state"] == "expired"


@pytest.mark.parametrize("query", ["do=0:fly:5", "colour=red", "at=-1"])
def test_an_invalid_scene_is_a_problem_that_names_the_value(api, query):
    value = query.partition("=")[2] if "colour" not in query else "colour"
    assert value in api.get(f"/v1/lab/scene?{query}", status=422).json["detail"]
    status, body = ask("/v1/lab/scene", query)
    assert (status, value in json.loads(body)["detail"]) == (422, True)


def test_alone_it_serves_nothing_else():
    assert ask("/v1/tasks")[0] == 404
    assert ask("/v1/lab/scene", method="POST")[0] == 405


def test_one_scene_is_played_at_a_time_and_few_may_wait(monkeypatch):
    going, go_on = threading.Event(), threading.Event()
    threads = set()

    def play(options):
        threads.add(threading.current_thread().name)
        going.set()
        assert go_on.wait(60)
        return {}

    monkeypatch.setattr(lab, "show", play)

    async def ask_many():
        app, scope = LabApp(), {"type": "http", "method": "GET", "path": "/v1/lab/scene"}
        statuses = []

        async def send(message):
            if "status" in message:
                statuses.append(message["status"])

        async def one():
            await app({**scope, "query_string": b"", "headers": []}, None, send)

        waiting = [asyncio.ensure_future(one()) for _ in range(MAX_WAITING)]
        await asyncio.to_thread(going.wait, 60)  # the loop is free while a scene is played
        await one()
        refused = list(statuses)
        go_on.set()
        await asyncio.gather(*waiting)
        return refused, statuses[1:]

    refused, answered = asyncio.run(ask_many())
    assert (refused, answered) == ([503], [200] * MAX_WAITING)
    assert len(threads) == 1
    assert "tickwheel-lab" in threads.pop()

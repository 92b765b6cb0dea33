"""Covers durable.exposition: the metrics of a scheduler in any program, and their recipes."""

import re
import threading
import urllib.request
from pathlib import Path
from wsgiref import simple_server

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tickwheel.durable import NotStarted, Scheduler

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "durable-observe.md"
RECIPES = dict(
    re.findall(r"^`(\w+)\.py`\n\n```py\n(.*?)```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
)
LONG = 60


def values(text, family):
    """Return the samples of a family: the values of the labels, and the value."""
    found = {one.name: one for one in text_string_to_metric_families(text)}
    return {(*one.labels.values(),): one.value for one in found[family].samples}


def test_the_metrics_are_those_of_this_scheduler(tmp_path):
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db")

    @app.task(name='a "b"')
    def double(number):
        return 2 * number

    with app.blocking() as b:
        b.wait(double.submit_sync(1), timeout=LONG)
        double.submit_sync(2, delay=3600)
        text = b.metrics()
    assert values(text, "tickwheel_submitted") == {(): 2}
    assert values(text, "tickwheel_tasks") == {("live",): 1, ("final",): 1}
    assert values(text, "tickwheel_service_enabled") == {('a "b"',): 1}
    with pytest.raises(NotStarted):
        b.metrics()


def test_a_store_that_does_not_answer_leaves_the_other_metrics(tmp_path, monkeypatch):
    with Scheduler(f"sqlite:///{tmp_path}/tasks.db").blocking() as b:

        async def fail():
            raise ConnectionError

        monkeypatch.setattr(b._node().store, "counts", fail)
        text = b.metrics()
    assert values(text, "tickwheel_store_up") == {(): 0}
    assert values(text, "tickwheel_submitted") == {(): 0}


def test_the_recipe_for_flask(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "metrics_flask"}
    exec(RECIPES["metrics_flask"], names)
    with names["shop"]:
        answer = names["web"].test_client().get("/metrics")
    assert answer.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert values(answer.text, "tickwheel_store_up") == {(): 1}


def test_the_recipe_for_a_program_without_a_web_server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made, original = [], simple_server.make_server

    def make_server(host, _, answer):
        made.append(original(host, 0, answer))
        listening.set()
        return made[0]

    listening = threading.Event()
    monkeypatch.setattr(simple_server, "make_server", make_server)
    names = {}
    exec(RECIPES["metrics_script"], names)
    program = threading.Thread(target=names["main"])
    program.start()
    assert listening.wait(LONG)
    with made[0] as server:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{server.server_port}", timeout=LONG
        ) as answer:
            text = answer.read().decode()
        server.shutdown()
    program.join(LONG)
    assert values(text, "tickwheel_store_up") == {(): 1}

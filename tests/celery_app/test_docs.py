"""The page about Celery: its program runs in a worker, with its URLs replaced by the test's."""

import importlib.util
import re
from pathlib import Path

import pytest

import servers
from celery_app.conftest import CELERY_WARNINGS, Worker, queued, redis_url

pytestmark = CELERY_WARNINGS

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "service-celery.md"


def test_the_app_of_the_page_waits_in_tickwheel_and_runs_once(
    tmp_path, redis, broker, server, client
):
    (code,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    for url, real in {
        "redis://127.0.0.1:6379/0": redis_url(redis),
        "redis://127.0.0.1:6379/1": redis_url(redis, 1),
        "http://127.0.0.1:7380": server.url,
    }.items():
        assert url in code
        code = code.replace(url, real)
    (tmp_path / "reminders.py").write_text(code)
    spec = importlib.util.spec_from_file_location("reminders", tmp_path / "reminders.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sent = module.remind.apply_async(("o-1",), countdown=11)  # above the threshold
    (task,) = client.list(key=sent.id).items
    assert task.payload["headers"]["argsrepr"] == "('o-1',)"
    assert queued(broker) == 0
    with Worker(tmp_path, app="reminders", folder=tmp_path) as worker:
        assert sent.get(timeout=servers.PATIENCE) == "order o-1 is waiting"
        assert len(client.attempts(task.id)) == 1
        assert worker.log_path.read_text().count(f"remind[{sent.id}] received") == 1
    assert queued(broker) == 0
    module.app.close()


@pytest.mark.parametrize("word", ["threshold", "service", "fallback"])
def test_every_option_is_on_the_page(word):
    assert f"{word}" in PAGE.read_text("utf-8")

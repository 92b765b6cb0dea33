"""Covers receiver.messages: the loop of docs/how-to/service-messages.md."""

import ast
import asyncio
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import receivers
from receiver.conftest import TASK_ID

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "service-messages.md"
EXAMPLE = PAGE.parents[2] / "examples" / "queue_worker.py"
CODE = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Consumer:
    """Has records as aiokafka's does, and counts commits."""

    def __init__(self, *messages):
        self.commits = 0
        self.records = [
            SimpleNamespace(headers=[(name, value.encode()) for name, value in headers.items()],
                            value=body)
            for headers, body in messages
        ]  # fmt: skip

    async def __aiter__(self):
        for record in self.records:
            yield record

    async def commit(self):
        self.commits += 1


def test_the_loop_that_is_shown_handles_a_task_and_reports_its_outcome(
    call, secret, monkeypatch, capsys
):
    program, _ = CODE.findall(PAGE.read_text("utf-8"))
    strange = ({"some": "header"}, b"{}")
    consumer = Consumer(call({"order": "o-1"}), strange)
    monkeypatch.setenv("TICKWHEEL_WEBHOOK_SECRET", secret)
    with receivers.Receiver() as server:
        verdict = b'{"won": true, "state": "finished"}'
        server.on(f"/v1/tasks/{TASK_ID}/feedback", receivers.answering(200, verdict))
        monkeypatch.setenv("TICKWHEEL_SERVER", server.url(""))
        code = compile(program, str(PAGE), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        asyncio.run(eval(code, {"consumer": consumer, "os": os}))
        (report,) = server.requests
    assert capsys.readouterr().out == "{'order': 'o-1'}\n"
    assert consumer.commits == 2
    assert json.loads(report.body)["outcome"] == "finished"


def test_the_loop_for_redis_is_that_of_the_example():
    _, loop = CODE.findall(PAGE.read_text("utf-8"))
    # The lines of the example, which are indented, break elsewhere.
    assert "".join(loop.split()) in "".join(EXAMPLE.read_text("utf-8").split())

"""The examples of docs/how-to/channels.md run on real servers, and its table has every channel."""

import asyncio
import re
import textwrap
from pathlib import Path

import aiormq
import pytest

from tickwheel.durable import Scheduler
from tickwheel.durable.implementations import channels_for

PAGE = (Path(__file__).resolve().parent.parent / "docs/how-to/channels.md").read_text("utf-8")


def section(title):
    """Return a section of the page, and its first example."""
    text = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]
    return re.search(r"^```py\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[1]


def run_example(code, path, capsys):
    """Run an example; each line that it prints is the comment behind the print."""
    code = code.replace("sqlite:///tasks.db", f"sqlite:///{path}/tasks.db")
    body = "async def main():\n" + textwrap.indent(code, "    ")
    names = {"Scheduler": Scheduler}
    exec(body, names)
    asyncio.run(names["main"]())
    assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\)  # (.*)", code)


def test_the_example_for_rabbitmq_runs(rabbit_server, tmp_path, capsys):
    async def declare():
        async with await aiormq.connect(rabbit_server.url) as connection:
            await (await connection.channel()).queue_declare("orders", durable=True)

    asyncio.run(declare())
    code = section("RabbitMQ").replace("127.0.0.1:5672", f"127.0.0.1:{rabbit_server.port}")
    run_example(code, tmp_path, capsys)


@pytest.mark.usefixtures("redis_url")
def test_the_example_for_redis_runs(redis_server, tmp_path, capsys):
    code = section("Redis Streams").replace("127.0.0.1:6379", f"127.0.0.1:{redis_server.port}")
    run_example(code, tmp_path, capsys)


def test_the_table_has_every_channel():
    named = set(re.findall(r"^\| \[?`(\w+)`", PAGE, re.MULTILINE))
    channels = channels_for(
        {}, lambda: 0.0, threads=1, allow_private=False, allow=(), own_port=None, max_calls=10,
        own={},
    )  # fmt: skip
    assert named == channels.keys()

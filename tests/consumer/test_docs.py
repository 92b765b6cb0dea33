"""Covers consumer: the program of docs/how-to/service-consume.md, on Redis."""

import ast
import asyncio
import re
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tickwheel.durable import Scheduler

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "service-consume.md"


def shown(kind):
    """Return the block of a kind; the page has one."""
    page = PAGE.read_text("utf-8")
    (block,) = re.findall(rf"^```{kind}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return block


@pytest.mark.asyncio
async def test_the_program_that_is_shown_makes_a_task_of_the_message_that_is_shown(
    redis_url, tmp_path
):
    app = Scheduler(f"sqlite:///{tmp_path}/tasks.db")
    names = {"Scheduler": lambda _: app}
    closed = []

    @app.task(name="close-order")
    async def close(order):
        closed.append(order)
        names["consumer"].stop()

    async with Redis.from_url(redis_url) as redis:
        await redis.xadd("orders", {"body": shown("json").replace("1800", "0")})
    program = shown("py").replace("kafka://localhost:9092", redis_url)
    code = compile(program, str(PAGE), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    async with asyncio.timeout(60):
        await eval(code, names)
    assert closed == ["o-1"]

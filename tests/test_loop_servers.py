"""EventLoop: uvicorn and aiohttp run on it, as docs/how-to/use-asyncio.md shows."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-to" / "use-asyncio.md"
SECONDS = 60
MAIN = """
import asyncio


async def app(scope, receive, send):
    await receive()
    print(type(asyncio.get_running_loop()).__name__)
    await send({"type": "lifespan.startup.failed"})
"""
AIOHTTP = """
import asyncio

import tickwheel
from aiohttp import web


def stop():
    raise web.GracefulExit


async def start(app):
    loop = asyncio.get_running_loop()
    print(type(loop).__name__)
    loop.call_soon(stop)
    await asyncio.Event().wait()


app = web.Application()
app.on_startup.append(start)
"""


def shown(kind):
    """Return the block of a kind; the page has one."""
    page = PAGE.read_text("utf-8")
    (block,) = re.findall(rf"^```{kind}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return block


def printed(folder, *words):
    command = [sys.executable, *words]
    ran = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert "Traceback" not in ran.stderr, ran.stderr
    return ran.stdout.splitlines()


def test_the_command_for_uvicorn_runs_an_application_on_the_loop(tmp_path):
    (tmp_path / "main.py").write_text(MAIN)
    assert printed(tmp_path, "-m", *shlex.split(shown("console"))) == ["EventLoop"]


def test_the_line_for_aiohttp_runs_an_application_on_the_loop(tmp_path):
    pytest.importorskip("aiohttp", reason="it is installed for the benchmarks")
    assert printed(tmp_path, "-c", AIOHTTP + shown("py")) == ["EventLoop"]

"""`serve` and `config`: flags, environment and file become one configuration."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import types
import urllib.request
from contextlib import contextmanager

import pytest

import servers
from tickwheel.config import SETTINGS
from tickwheel.durable import Scheduler


@pytest.fixture
def served(monkeypatch):
    """The configuration that `serve` would run with; no server is started."""
    configs = []
    module = types.ModuleType("tickwheel.web.server")
    module.run = lambda config: configs.append(config) or 0
    monkeypatch.setitem(sys.modules, "tickwheel.web.server", module)
    return configs


def test_serve_runs_with_its_flags(run, served):
    words = [
        "--listen",
        "127.0.0.1:0",
        "--allow-target",
        "10.0.0.0/8",
        "--allow-target",
        "fd00::/8",
    ]
    assert run("serve", "--submit-only", "--grace", "5s", *words).code == 0
    [config] = served
    assert config.listen == ("127.0.0.1", 0)
    assert config.allow_target == ("10.0.0.0/8", "fd00::/8")
    assert config.submit_only
    assert config.grace == 5


def test_serve_reads_the_environment_and_the_file(run, served, monkeypatch, tmp_path):
    (tmp_path / "t.toml").write_text("cap = 7\nshards = 9")
    monkeypatch.setenv("TICKWHEEL_CAP", "8")
    run("serve", "--config", tmp_path / "t.toml")
    assert (served[0].cap, served[0].shards) == (8, 9)


def test_the_exit_code_of_serve_is_the_servers(run, served, monkeypatch):
    monkeypatch.setattr(sys.modules["tickwheel.web.server"], "run", lambda config: 7)
    assert run("serve").code == 7


def test_serve_has_a_flag_for_every_setting_except_secrets(run):
    text = run("serve", "--help").out
    for setting in SETTINGS:
        assert (f"{setting.flag} " in text) == (not setting.secret)
    assert "--secret-key" not in text
    assert "TICKWHEEL_SECRET_KEY" in text


def test_config_shows_every_setting_and_masks_secrets(run, monkeypatch):
    monkeypatch.setenv("TICKWHEEL_SECRET_KEY", "hunter2" * 3)
    monkeypatch.setenv("TICKWHEEL_STORE", "postgresql://u:hunter2@h/db")
    shown = run("config").json
    assert list(shown) == [setting.name for setting in SETTINGS]
    assert shown["secret_key"] == "********"
    assert "hunter2" not in str(shown)
    table = run("config", "--table", "--listen", "127.0.0.1:1").out
    assert "flag --listen" in table
    assert "environment TICKWHEEL_STORE" in table
    assert re.search(r"^grace +10s +default ", table, re.MULTILINE)
    assert "hunter2" not in table


def test_the_output_of_config_is_a_valid_file(run, tmp_path):
    shown = run("config", "--allow-target", "10.0.0.0/8").json
    lines = []
    for name, value in shown.items():
        if value is not None:
            text = str(value).lower() if isinstance(value, bool) else repr(value)
            lines.append(f"{name} = {text}")
    (tmp_path / "again.toml").write_text("\n".join(lines))
    assert run("config", "--config", tmp_path / "again.toml").json == shown


def test_a_wrong_setting_starts_nothing(run, served):
    ran = run("serve", "--listen", "nowhere")
    assert ran.code == 2
    assert ran.err.startswith("error: --listen must be HOST:PORT")
    assert not served


def test_lab_draws_a_wheel():
    argv = [sys.executable, "-m", "tickwheel", "lab", "--once", "--size", "8"]
    ran = subprocess.run(argv, capture_output=True, timeout=60, text=True, check=False)
    assert ran.returncode == 0
    assert "level 1" in ran.stdout


@contextmanager
def started(*words):
    """Start a command that serves pages; give the URL that it prints."""
    argv = [sys.executable, "-m", "tickwheel", *words, "--listen", "127.0.0.1:0"]
    process = servers.launch(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        found = (re.search(rb"http://[0-9.:]+/(lab)?", line) for line in process.stdout)
        yield next(filter(None, found))[0].decode()
    finally:
        process.terminate()
        process.communicate(timeout=60)


def page_of(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def test_dashboard_serves_the_pages_and_the_tasks_of_a_store(tmp_path):
    store = f"sqlite:///{tmp_path}/tasks.db"
    task = asyncio.run(submitted(store))
    with started("dashboard", "--store", store) as url:
        assert "static/dashboard.js" in page_of(url)
        assert task.id in page_of(f"{url}v1/tasks")


def test_dashboard_may_call_private_targets_where_it_is_told_so(run, served):
    words = ["--allow-private-targets", "--allow-target", "10.0.0.0/8"]
    assert run("dashboard", *words).code == 0
    [config] = served
    assert (config.submit_only, config.allow_private_targets) == (True, True)
    assert config.allow_target == ("10.0.0.0/8",)


async def submitted(store):
    """Submit a task that is due, and run nothing; return it."""
    async with Scheduler(store, dispatch=False, allow_private_targets=True) as app:
        await app.put_service("mail", endpoint="http://127.0.0.1:9/")
        return await app.submit("mail")


def test_the_lab_is_at_the_address_that_it_prints():
    with started("lab", "--web") as url:
        assert "static/lab.js" in page_of(url)
        root = url.removesuffix("/lab")
        scene = page_of(f"{root}/v1/lab/scene?kind=wheel&size=20&do=0:add:350")
        assert json.loads(scene)["entries"][0]["path"] == [{"at": 0, "level": 2, "slot": 17}]


def test_the_lab_in_a_browser_names_the_extra_that_is_missing(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    ran = run("lab", "--web")
    assert ran.code == 1
    assert "uvicorn" in ran.err
    assert "pip install 'tickwheel[server]'" in ran.err


def test_the_lab_names_an_address_that_is_taken(run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        ran = run("lab", "--web", "--listen", address)
    assert ran.code == 2
    assert f"{address}: Address already in use" in ran.err


def test_config_omits_the_help_on_a_narrow_terminal(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("config", "--table").out.splitlines()
    assert "what it is" not in lines[0]
    assert len(lines) == len(SETTINGS) + 2
    monkeypatch.setenv("COLUMNS", "160")
    assert "what it is" in run("config", "--table").out


def test_a_mistyped_variable_is_a_warning(run, monkeypatch, served):
    monkeypatch.setenv("TICKWHEEL_LISTN", "127.0.0.1:1")
    warning = "warning: TICKWHEEL_LISTN is not a setting: did you mean TICKWHEEL_LISTEN?\n"
    assert run("serve").err == warning
    assert run("config").err == warning

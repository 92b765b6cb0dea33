"""A hostile server: its text never reaches a terminal or a shell unescaped."""

import ast
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import tickwheel.cli
from cli.fakes import AT, ID
from client.fake import FakeServer, Reply, problem
from tickwheel.cli.remote import schedule_names, service_names
from tickwheel.cli.terminal import escape_controls

ODD = "odd\x1b]0;pwned\x07\x9b2J\u202e\r\x08\x00"
ACTS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")

TASK = {
    "id": ODD, "service": ODD, "payload": {ODD: ODD}, "key": ODD, "state": "failed", "due_at": AT,
    "shard": 3, "attempt": 2, "failures": 1, "max_attempts": 5, "created_at": AT,
    "updated_at": AT, "result": ODD, "error": ODD, "priority": 0, "timeout": None,
    "deadline": None, "replay_of": ODD, "replayed_as": ODD, "node": ODD, "epoch": 1, ODD: ODD,
}  # fmt: skip
SERVICE = {
    "name": ODD, "protocol": ODD, "endpoint": ODD, "timeout": 1.0, "max_attempts": 5, "backoff": {},
    "concurrency": 1, "rate": None, "secret": ODD, "headers": {ODD: ODD}, "feedback_timeout": 1.0,
    "breaker": None, "enabled": True, "version": 1, "updated_at": AT, "problem": ODD, ODD: ODD,
}  # fmt: skip
SCHEDULE = {
    "name": ODD, "service": ODD, "payload": ODD, "cron": ODD, "interval": None, "tz": ODD,
    "missed": ODD, "enabled": True, "priority": 0, "timeout": None, "max_attempts": 5,
    "next_at": AT, "created_at": AT, ODD: ODD,
}  # fmt: skip
ATTEMPT = {
    "attempt": 1, "event": "retry", "node": ODD, "epoch": 1, "started_at": AT, "ended_at": AT,
    "error": ODD, "delivered_to": {ODD: ODD}, ODD: ODD,
}  # fmt: skip
NODE = {"name": ODD, "started_at": AT, "lease_until": AT, "shards": 1, "this": True, ODD: ODD}
AUDIT = {
    "at": AT, "actor": ODD, "namespace": ODD, "action": ODD, "target": ODD, "request": ODD,
    "detail": ODD,
}  # fmt: skip
STATS = {
    "lateness": {"buckets": []}, "store": {ODD: 1}, "services": {ODD: {"breaker": ODD}},
    "uptime": 1.0,
}  # fmt: skip
WHEEL = {"levels": [{"level": ODD, "tick": 1, "counts": [1], "pointer": 0}]}
ITEMS = {
    "tasks": TASK, "backlog": TASK, "attempts": ATTEMPT, "services": SERVICE, "schedules": SCHEDULE,
    "nodes": NODE, "shards": {"shard": 1, "owner": ODD, "epoch": 1, ODD: ODD}, "audit": AUDIT,
}  # fmt: skip
BATCH = {
    "items": [
        {"status": 201, "id": ODD, "state": "delay", "due_at": AT},
        {"status": 409, "problem": {"status": 409, "code": ODD, "detail": f"{ODD}\nerror: {ODD}"}},
    ],
    "stored": 1,
    "refused": 1,
}


def answer_for(asked):
    """Answer with the odd text in every field that may be text."""
    path, _, query = asked.path.partition("?")
    parts = path.removeprefix("/v1/").split("/")
    if "cursor" in query:
        return Reply(200, {"items": [], "next_cursor": None})
    if parts[-1] == "batch":
        return Reply(200, BATCH)
    if parts[-1] in ("cancel", "reschedule", "feedback") and len(parts) == 3:
        return Reply(200, {"won": True, "state": "failed"})
    if parts == ["stats"]:
        return Reply(200, STATS)
    if parts == ["wheel"]:
        return Reply(200, WHEEL)
    if asked.method == "DELETE":
        return Reply(204)
    if asked.method == "GET" and parts[-1] in ITEMS:
        return Reply(200, {"items": [ITEMS[parts[-1]]], "next_cursor": ODD})
    return Reply(200, ITEMS[parts[0]])


COMMANDS = [
    ["submit", "s"], ["submit", "s", "-q"], ["submit-many", "-"], ["show", ID],
    ["show", ID, "--attempts"], ["list"], ["list", "--limit", "1"], ["cancel", ID],
    ["reschedule", ID, "--delay", "1"], ["feedback", ID, "failed", "--attempt", "1"],
    ["backlog", "list"], ["backlog", "list", "--limit", "1"], ["backlog", "replay", ID],
    ["services", "list"], ["services", "show", "s"], ["services", "put", "s", "--rate", "1"],
    ["services", "delete", "s"], ["schedules", "list"], ["schedules", "show", "s"],
    ["nodes", "list"], ["shards"], ["audit"], ["audit", "--limit", "1"],
    ["top", "--once", "--interval", "0.1"],
]  # fmt: skip
QUIET = (["services", "delete"], ["services", "put"])
forms = pytest.mark.parametrize("form", ["--table", "--json"])
commands = pytest.mark.parametrize("words", COMMANDS, ids=" ".join)


@pytest.fixture
def server(monkeypatch):
    with FakeServer() as fake:
        fake.otherwise = answer_for
        monkeypatch.setenv("TICKWHEEL_SERVER", fake.url)
        yield fake


def check(ran, form):
    """Check that nothing in the output acts on a terminal, and that JSON keeps everything."""
    for text in (ran.out, ran.err):
        assert not ACTS.search(text), repr(text)
    if form == "--json" and ran.code == 0 and ran.out.startswith("{"):
        for line in ran.out.splitlines():
            json.loads(line)


@forms
@commands
def test_no_answer_reaches_a_terminal_raw(run, server, words, form):
    ran = run(*words, form, stdin='{"service": "s"}\n{"service": "s"}\n')
    check(ran, form)
    assert server.asked
    if words[:2] not in QUIET and words[0] not in ("cancel", "reschedule", "feedback"):
        assert "pwned" in ran.out + ran.err


@forms
@commands
def test_no_refusal_reaches_a_terminal_raw(run, server, words, form):
    headers = {"x-request-id": "odd\x9b2J"}
    server.otherwise = problem(422, "odd\x1b[2J", f"{ODD}\nerror: {ODD}", headers, **{ODD: ODD})
    ran = run(*words, form, stdin='{"service": "s"}\n')
    check(ran, form)
    assert ran.code != 0
    assert "pwned" in ran.out + ran.err
    if form == "--table":
        assert len(ran.err.splitlines()) == 1


def test_a_cursor_is_shown_escaped(run, server):
    server.otherwise = Reply(200, {"items": [TASK] * 100, "next_cursor": ODD})
    ran = run("list", "--table")
    assert ran.err == f"there are more: --cursor {escape_controls(ODD)}, or --all\n"


@pytest.mark.parametrize(("names", "path"), [(service_names, "s"), (schedule_names, "d")])
def test_a_name_that_a_shell_would_act_on_is_not_completed(server, names, path):
    odd = ["good-1.2:x", "bad\n", "bad\x1b[2J", "bad$(reboot)", "bad;x", "bad x", ""]
    given = {"s": SERVICE, "d": SCHEDULE}[path]
    page = {"items": [given | {"name": name} for name in odd], "next_cursor": None}
    server.otherwise = Reply(200, page)

    context = SimpleNamespace(params={"server": server.url})
    assert [item.value for item in names(context, None, "")] == ["good-1.2:x"]


def test_only_terminal_prints_text():
    """A command prints through `messages`, or as a table cell."""
    found = set()
    for path in Path(tickwheel.cli.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name in ("click.echo", "click.secho", "print", "sys.stdout.write"):
                found.add(path.stem)
    assert found == {"terminal", "completion"}  # completion prints click's own script

"""Every command on a real server: what is printed, what is piped, and the exit codes."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from receivers import Receiver
from web.serving import Served

WATCHDOG = 60.0
NOBODY = "0" * 32


@pytest.fixture(scope="module")
def receiver():
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    home = tmp_path_factory.mktemp("server")
    store = f"sqlite:///{home}/tasks.db"
    with Served("--store", store, "--allow-private-targets", cwd=home) as server:
        server.store = store
        yield server


@pytest.fixture(autouse=True)
def _asked(server, monkeypatch):
    monkeypatch.setenv("TICKWHEEL_SERVER", server.url)


@pytest.fixture
def ok(run):
    """Run a command that must succeed."""

    def ok(*words, **options):
        ran = run(*words, **options)
        assert (ran.code, ran.err) == (0, ""), ran
        return ran

    return ok


@pytest.fixture
def name(request, ok, receiver):
    """A service of the test's own, which answers 200."""
    name = "s-" + re.sub(r"\W", "-", request.node.name)[-80:]
    ok("services", "put", name, "--endpoint", receiver.url("/json"))
    return name


def process(*words, **options):
    argv = [sys.executable, "-m", "tickwheel", *map(str, words)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(argv, text=True, **options)


def wait_for_state(ok, task_id, *states):
    """Ask until the task is in one of these states."""
    limit = time.monotonic() + WATCHDOG
    while True:
        task = ok("show", task_id).json
        if task["state"] in states:
            return task
        assert time.monotonic() < limit, task
        time.sleep(0.01)


def test_submit_show_list_reschedule_and_cancel(ok, run, name):
    task = ok("submit", name, '{"order": "o-1"}', "--delay", "1h", "--key", "o-1").json
    assert (task["state"], task["payload"], task["key"]) == ("delay", {"order": "o-1"}, "o-1")
    assert ok("show", task["id"]).json == task
    assert [line["id"] for line in ok("list", "--service", name).lines] == [task["id"]]
    assert ok("list", "--key", "o-1", "--service", name, "--state", "running").out == ""
    moved = ok("reschedule", task["id"], "--due-at", "2040-01-01T00:00:00Z").json
    assert (moved["won"], moved["state"]) == (True, "delay")
    assert ok("show", task["id"]).json["due_at"] == "2040-01-01T00:00:00.000Z"
    assert ok("cancel", task["id"]).json["won"]
    again = run("cancel", task["id"])
    assert (again.code, again.json["won"], again.json["state"]) == (4, False, "cancelled")
    assert run("reschedule", task["id"], "--delay", "1").code == 4


def test_submit_show_list_and_cancel_print_tables(ok, name):
    out = ok("submit", name, "1", "--delay", "1h", "--table").out
    task_id = out.split()[0]
    assert re.fullmatch(rf"{task_id} is due at \S+Z\n", out)
    for words in (["show", task_id], ["show", task_id, "--attempts"], ["list", "--service", name]):
        assert task_id in ok(*words, "--table").out
    assert ok("reschedule", task_id, "--delay", "2h", "--table").out.endswith("now delay\n")
    assert ok("cancel", "--yes", "--service", name, "--table").out == "cancelled 1\n"
    assert task_id in ok("backlog", "list", "--service", name, "--table").out


@pytest.mark.parametrize(
    "text", ['{"amount": 12345678901234567.89, "rate": 1.10}', '{"a": 1, "a": 2}', '{"x": 1e400}']
)
def test_a_payload_arrives_as_it_was_typed(ok, run, name, receiver, text):
    one = ok("submit", name, text, "-q").out.strip()
    line = f'{{"service": "{name}", "payload": {text}}}'
    two = run("submit-many", "-", "--json", stdin=line).lines[0]["id"]
    for task_id in (one, two):
        assert wait_for_state(ok, task_id, "finished")
        bodies = [r.body for r in receiver.requests if r.header("webhook-id") == task_id]
        assert bodies == [text.encode()]


def test_a_task_is_called_and_its_attempts_are_shown(ok, name, receiver):
    task_id = ok("submit", name, '{"a": 1}', "-q").out.strip()
    task = wait_for_state(ok, task_id, "finished")
    assert task["result"] == {"done": True}
    assert [r.body for r in receiver.requests if r.header("webhook-id") == task_id] == [b'{"a": 1}']
    [attempt] = ok("show", task_id, "--attempts").json["attempts"]
    assert attempt["attempt"] == 1


def test_feedback_ends_an_accepted_task_and_counts_once(ok, run, name, receiver):
    ok("services", "put", name, "--endpoint", receiver.url("/accepted"))
    task_id = ok("submit", name, "-q").out.strip()
    receiver.wait(lambda: any(r.header("webhook-id") == task_id for r in receiver.requests))
    assert ok("feedback", task_id, "progress", "--attempt", "1").json["won"]
    verdict = ok("feedback", task_id, "finished", "--attempt", "1", "--result", "[7]").json
    assert (verdict["won"], verdict["state"]) == (True, "finished")
    assert ok("show", task_id).json["result"] == [7]
    late = run("feedback", task_id, "finished", "--attempt", "1", "--json")
    assert (late.code, json.loads(late.err)["code"]) == (4, "attempt_over")


def test_an_ended_task_is_in_the_backlog_and_can_be_replayed(ok, run, name):
    task_id = ok("submit", name, "--delay", "1h", "-q").out.strip()
    ok("cancel", task_id)
    [line] = ok("backlog", "list", "--service", name, "--state", "cancelled").lines
    assert line["id"] == task_id
    new = ok("backlog", "replay", task_id, "--delay", "1h").json
    assert new["replay_of"] == task_id
    assert run("backlog", "replay", task_id).code == 4
    assert ok("backlog", "replay", task_id, "--force", "--delay", "1h").code == 0
    ok("cancel", "--yes", "--service", name)
    assert ok("backlog", "replay", "--service", name, "--state", "cancelled").json["replayed"] == 2


def test_put_show_enable_disable_and_delete_a_service(ok, run, receiver):
    made = ok("services", "put", "svc", "--endpoint", receiver.url(), "--generate-secret").json
    assert made["secret"].startswith("whsec_")
    assert ok("services", "show", "svc").json["secret"] == "********"
    ok("services", "put", "svc", "--rate", "5", "--header", "x-a: b", "--backoff-first", "3s")
    kept = ok("services", "show", "svc").json
    assert (kept["endpoint"], kept["rate"], kept["secret"]) == (receiver.url(), 5.0, "********")
    assert kept["backoff"]["first"] == 3
    assert kept["headers"] == {"x-a": "********"}
    ok("services", "put", "svc", "--generate-secret", "--keep-old")
    ok("services", "put", "svc", "--replace", "--endpoint", receiver.url("/new"))
    kept = ok("services", "show", "svc").json
    assert (kept["rate"], kept["secret"], kept["headers"]) == (
        None,
        "********",
        {"x-a": "********"},
    )
    elsewhere = ["--endpoint", "http://127.0.0.1:9/"]
    refused = run("services", "put", "svc", *elsewhere)
    assert (refused.code, "no other origin" in refused.err) == (5, True)
    moved = ok("services", "put", "svc", *elsewhere, "--no-secret", "--no-headers").json
    assert (moved["secret"], moved["headers"]) == (None, {})
    assert not ok("services", "disable", "svc").json["enabled"]
    assert "disabled" in ok("services", "disable", "svc", "--table").out
    assert ok("services", "enable", "svc").json["enabled"]
    assert "svc" in [line["name"] for line in ok("services", "list").lines]
    assert "svc" in ok("services", "list", "--table").out
    task_id = ok("submit", "svc", "--delay", "1h", "-q").out.strip()
    assert run("services", "delete", "svc").code == 4
    ok("cancel", task_id)
    assert ok("services", "delete", "svc").json == {"deleted": "svc"}
    assert run("services", "show", "svc").code == 3


@pytest.mark.parametrize(
    "config",
    [
        {"backoff": {"delays": [60.0, 300.0, 3600.0], "jitter": 0.0}},
        {"backoff": {"factor": 0.5}},
        {"timeout": None, "rate": None, "breaker": None},
    ],
    ids=str,
)
def test_disable_enable_and_put_change_no_other_field(ok, name, config):
    made = ok("services", "put", name, "--from", json.dumps(config)).json
    for field, value in config.items():
        kept = made[field] if value is None else {key: made[field][key] for key in value}
        assert kept == value
    ok("services", "disable", name)
    ok("services", "enable", name)
    now = ok("services", "put", name, "--enabled").json
    assert now == made | {"version": now["version"], "updated_at": now["updated_at"]}
    assert now["version"] == made["version"] + 3


def test_a_growing_backoff_replaces_a_list_of_delays(ok, name):
    delays = json.dumps({"backoff": {"delays": [60], "jitter": 0}})
    ok("services", "put", name, "--from", delays)
    found = ok("services", "put", name, "--backoff-jitter", "0.5").json["backoff"]
    assert (found["delays"], found["jitter"]) == ([60], 0.5)
    found = ok("services", "put", name, "--backoff-first", "3s").json["backoff"]
    assert (found["delays"], found["first"], found["jitter"]) == ([], 3, 0.5)


def test_put_show_and_delete_a_schedule(ok, run, name):
    words = ["--cron", "0 3 * * *", "--tz", "Europe/Berlin", "--missed", "skip"]
    made = ok("schedules", "put", "nightly", name, '{"a": 1}', *words).json
    assert (made["cron"], made["tz"], made["missed"]) == ("0 3 * * *", "Europe/Berlin", "skip")
    assert ok("schedules", "show", "nightly").json == made
    assert "nightly" in [line["name"] for line in ok("schedules", "list").lines]
    assert "nightly" in ok("schedules", "list", "--table").out
    assert ok("schedules", "put", "nightly", name, "--interval", "1h").json["interval"] == 3600
    assert ok("schedules", "delete", "nightly").json == {"deleted": "nightly"}
    assert run("schedules", "show", "nightly").code == 3
    assert run("schedules", "put", "odd", name, "--cron", "61 * * * *").code == 5


def test_nodes_shards_and_the_audit_log_are_listed(ok, name):
    [node] = ok("nodes", "list").lines
    shards = ok("shards").lines
    assert node["shards"] == len(shards) == 64
    assert {shard["owner"] for shard in shards} == {node["name"]}
    lines = ok("audit", "--all").lines
    assert ("service.put", name) in [(line["action"], line["target"]) for line in lines]
    for words in (["nodes", "list"], ["shards"]):
        assert node["name"] in ok(*words, "--table").out
    assert "service.put" in ok("audit", "--all", "--table").out


def test_submit_many_reads_lines_and_arrays(run, ok, name, tmp_path):
    lines = [{"service": name, "payload": n, "delay": 3600} for n in range(2500)]
    (tmp_path / "t.ndjson").write_text("\n".join(map(json.dumps, lines)))
    ran = run("submit-many", tmp_path / "t.ndjson")
    assert (ran.code, ran.err) == (0, "stored 2,500, refused 0\n")
    assert len({line["id"] for line in ran.lines}) == 2500
    odd = [{"payload": 1, "delay": 3600, "key": "k"}, {"payload": 2, "delay": 3600, "key": "k"}]
    ran = run("submit-many", "-", "--service", name, "--batch", "1", stdin=json.dumps(odd))
    assert (ran.code, ran.err) == (4, "stored 1, refused 1\n")
    assert {line.get("problem", {}).get("code") for line in ran.lines} == {None, "key_taken"}
    listed = ok("list", "--service", name, "--all").lines
    assert len(listed) == 2501
    assert ok("cancel", "--yes", "--service", name).json["cancelled"] == 2501


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["show", NOBODY], 3, "unknown_task"),
        (["cancel", NOBODY], 3, "unknown_task"),
        (["services", "show", "nobody"], 3, "unknown_service"),
        (["services", "delete", "nobody"], 3, "unknown_service"),
        (["schedules", "delete", "nobody"], 3, "unknown_schedule"),
        (["submit", "nobody"], 5, "unknown_service"),
        (["services", "put", "odd", "--endpoint", "ftp://h/"], 5, None),
        (["services", "put", "odd", "--endpoint", "http://169.254.169.254/"], 5, "target_refused"),
        (["list", "--cursor", "odd"], 5, None),
        (["list", "--token", "tw_0123456789ab_" + "x" * 43], 6, "unauthorized"),
        (["list", "--server", "http://127.0.0.1:9"], 7, "server_unavailable"),
    ],
)
def test_an_error_is_a_problem_document_with_its_exit_code(run, words, code, problem):
    ran = run(*words, "--json")
    assert (ran.code, ran.out) == (code, "")
    document = json.loads(ran.err)
    assert problem in (None, document["code"])
    line = run(*words, "--table").err
    assert line.startswith("error: ")
    assert f"({document['code']}" in line
    assert line.count("\n") == 1


def test_top_prints_one_frame_of_the_server(ok, server):
    frame = ok("top", "--once", "--interval", "0.1", "--table").out
    assert f"tickwheel top  {server.url}" in frame
    assert "level 1" in frame
    document = ok("top", "--json", "--interval", "0.1").json
    assert document["rates"]["submitted"] is not None
    assert document["wheel"]["levels"]


def test_bench_measures_and_leaves_nothing_behind(ok):
    measures = ok("bench", "--count", "200", "--batch", "70", "--connections", "4").json
    assert [measure["count"] for measure in measures] == [200] * 4
    assert [measure["refused"] for measure in measures] == [0] * 4
    assert all(measure["rate"] > 0 for measure in measures)
    assert measures[3]["p50"] >= 0
    assert not bench_services(ok)


def bench_services(ok):
    """Return the services that benches have created."""
    return [line for line in ok("services", "list").lines if line["name"].startswith("bench-")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_bench_cleans_up(ok, number, code):
    limit = time.monotonic() + WATCHDOG
    with process("bench", "--count", "1000000", "--seconds", "600") as running:
        try:
            while not bench_services(ok):
                assert running.poll() is None
                assert time.monotonic() < limit
            running.send_signal(number)
            output = running.communicate(timeout=WATCHDOG)
        finally:
            running.kill()
    assert running.returncode == code
    assert "Traceback" not in "".join(output)
    assert not bench_services(ok)


def test_a_token_grants_access_by_its_scopes(run, ok, tmp_path):
    store = f"sqlite:///{tmp_path}/tasks.db"
    made = {}
    for scope in ("submit", "read", "admin"):
        made[scope] = run("tokens", "create", scope, "--scope", scope, "--store", store, "-q").out
    with Served("--store", store, "--allow-private-targets", cwd=tmp_path) as server:
        here = ["--server", server.url]
        assert run("list", *here).code == 6
        assert run("list", *here, "--token", made["read"].strip()).code == 0
        assert run("list", *here, "--token", made["submit"].strip()).code == 6
        assert run("audit", *here, "--token", made["read"].strip()).code == 6
        for words in (["put", "mail", "--rate", "5"], ["enable", "mail"]):
            ran = run("services", *words, *here, "--token", made["submit"].strip())
            assert (ran.code, "lacks the scope 'admin'" in ran.err) == (6, True)
        ran = run("list", "--server", f"{server.url}/v1", "--token", made["read"].strip())
        assert "ends in /v1" in ran.err
        lines = run("audit", *here, "--token", made["admin"].strip()).lines
        assert {line["action"] for line in lines} == {"token.create"}


def test_a_list_is_written_line_by_line_and_its_reader_may_stop_early(ok, name):
    lines = "\n".join('{"payload": "%s", "delay": 3600}' % ("x" * 1000) for _ in range(1500))
    with process("submit-many", "-", "--service", name, stdin=subprocess.PIPE) as filling:
        filling.communicate(lines, timeout=WATCHDOG)
    with process("list", "--all", "--service", name) as listing:
        first = json.loads(listing.stdout.readline())
        listing.stdout.close()  # as `| head -1` does
        output = listing.stderr.read()
        listing.wait(WATCHDOG)
    assert first["service"] == name
    assert output == ""
    ok("cancel", "--yes", "--service", name)


def test_ctrl_c_ends_a_command_with_130_and_no_traceback(tmp_path):
    pipe = tmp_path / "tasks.ndjson"
    os.mkfifo(pipe)
    with process("submit-many", pipe) as waiting:
        writing = open_pipe_of(waiting, pipe)
        waiting.send_signal(signal.SIGINT)
        output = waiting.communicate(timeout=WATCHDOG)
        os.close(writing)
    assert waiting.returncode == 130
    assert "Traceback" not in "".join(output)


def open_pipe_of(command, pipe):
    """Open a pipe for writing as soon as the command reads from it."""
    limit = time.monotonic() + WATCHDOG
    while True:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # the reading end is not open yet
            assert command.poll() is None, command.stderr.read()
            assert time.monotonic() < limit
            time.sleep(0.005)


def test_on_a_terminal_top_draws_until_q_and_lists_are_tables(server):
    drawn = on_terminal(["top", "--interval", "0.1"], b"tickwheel top", b"q")
    assert b"\x1b[?1049h" in drawn  # the alternate screen
    assert b"\x1b[?1049l" in drawn  # and back
    assert b"shards" in on_terminal(["nodes", "list"], b"", b"")


def test_submit_many_shows_a_progress_bar_on_a_terminal(ok, name, tmp_path):
    lines = [json.dumps({"service": name, "payload": n, "delay": 3600}) for n in range(3000)]
    (tmp_path / "t.ndjson").write_text("\n".join(lines))
    shown = on_terminal(["submit-many", tmp_path / "t.ndjson"], b"", b"")
    assert b"submitting" in shown
    assert shown.endswith(b"stored 3,000, refused 0\r\n")
    ok("cancel", "--yes", "--service", name)


def test_cancelling_all_tasks_of_a_service_asks_on_a_terminal(ok, run, name):
    ok("submit", name, "--delay", "1h")
    shown = on_terminal(["cancel", "--service", name], b"[y/N]", b"n\n", code=1)
    assert b"Cancel all matching tasks" in shown
    assert ok("list", "--service", name).lines
    assert b"cancelled 1" in on_terminal(["cancel", "--service", name], b"[y/N]", b"y\n")


def on_terminal(words, awaited, keys, code=0):
    """Run a command on a terminal; press `keys` once it has printed `awaited`."""
    master, slave = pty.openpty()
    environ = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    options = {"stdin": slave, "stdout": slave, "stderr": slave, "env": environ}
    shown = b""
    with process(*words, **options) as command:
        os.close(slave)
        watchdog = threading.Timer(WATCHDOG, command.kill)
        watchdog.start()
        try:
            while True:
                select.select([master], [], [], WATCHDOG)
                try:
                    part = os.read(master, 65_536)
                except OSError:  # the other end is closed
                    break
                if not part:
                    break
                shown += part
                if keys and awaited in shown:
                    os.write(master, keys)
                    keys = b""
            assert command.wait(WATCHDOG) == code, shown
        finally:
            watchdog.cancel()
            os.close(master)
    return shown


def test_tags_are_given_shown_and_filtered_by(ok, run, name):
    words = ("submit", name, "1", "--delay", "1h", "-q")
    both = ok(*words, "--tag", f"{name[-20:]}", "--tag", "vip").out.strip()
    one = ok(*words, "--tag", f"{name[-20:]}").out.strip()
    assert ok("show", both).json["tags"] == [name[-20:], "vip"]
    listed = ok("list", "--tag", name[-20:], "--json").out.splitlines()
    assert {json.loads(line)["id"] for line in listed} == {both, one}
    listed = ok("list", "--tag", name[-20:], "--tag", "vip", "--json").out.splitlines()
    assert [json.loads(line)["id"] for line in listed] == [both]
    refused = run("cancel", "--tag", name[-20:])
    assert (refused.code, "--yes" in refused.err) == (2, True)
    assert ok("cancel", "--tag", name[-20:], "--yes").json == {"cancelled": 2}
    listed = ok("backlog", "list", "--tag", "vip", "--service", name, "--json").out.splitlines()
    assert [json.loads(line)["id"] for line in listed] == [both]
    replayed = ok("backlog", "replay", "--tag", name[-20:], "--state", "cancelled")
    assert replayed.json == {"replayed": 2}


def test_a_bad_tag_is_a_usage_error_that_names_it(run, name):
    refused = run("submit", name, "--tag", "a b")
    assert (refused.code, "got 'a b'" in refused.err) == (2, True)

"""The calls of the client that each command makes, and the output that it prints."""

import json
from datetime import UTC, datetime
from types import SimpleNamespace

import click
import pytest

from cli.fakes import AT, ID, service, task
from tickwheel.cli import remote
from tickwheel.cli.output import Output
from tickwheel.client import ApiError, Attempt, Json, Page, State, Verdict
from tickwheel.errors import ServiceChanged, UnknownService, UnknownTask

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (["submit", "sums"], ("submit", ("sums", None), {})),
        (["submit", "sums", '{"a": [1.5]}', "--delay", "1h30m", "--key", "k"],
         ("submit", ("sums", Json('{"a": [1.5]}')), {"delay": 5400.0, "key": "k"})),
        (["submit", "sums", "--due-at", "2030-01-31T13:00:00+01:00", "--on-conflict", "keep"],
         ("submit", ("sums", None), {"at": NOON, "on_conflict": "keep"})),
        (["submit", "s", "--timeout", "5s", "--priority", "-3", "--max-attempts", "2",
          "--deadline", AT, "--idempotency-key", "i"],
         ("submit", ("s", None), {"timeout": 5.0, "priority": -3, "max_attempts": 2,
                                  "deadline": NOON, "idempotency_key": "i"})),
        (["show", ID], ("get", (ID,), {})),
        (["list", "--state", "ready", "--service", "s", "--key", "k", "--due-before", AT],
         ("list", (), {"state": "ready", "service": "s", "key": "k", "due_before": NOON,
                       "limit": 100})),
        (["list", "--due-after", AT], ("list", (), {"due_after": NOON, "limit": 100})),
        (["cancel", ID], ("cancel", (ID,), {})),
        (["cancel", "--key", "k"], ("cancel_where", (), {"key": "k"})),
        (["cancel", "--service", "s", "--due-before", AT, "-y"],
         ("cancel_where", (), {"service": "s", "due_before": NOON})),
        (["reschedule", ID, "--delay", "5m"], ("reschedule", (ID,), {"delay": 300.0})),
        (["reschedule", ID, "--at", AT], ("reschedule", (ID,), {"at": NOON})),
        (["feedback", ID, "finished", "--attempt", "2", "--epoch", "7", "--result", "[1]"],
         ("feedback", (ID, "finished"), {"attempt": 2, "epoch": 7, "result": Json("[1]")})),
        (["feedback", ID, "failed", "--attempt", "1", "--error", "no", "--no-retry"],
         ("feedback", (ID, "failed"), {"attempt": 1, "error": "no", "retry": False})),
        (["backlog", "list", "--state", "failed"],
         ("backlog", (), {"state": "failed", "limit": 100})),
        (["backlog", "replay", ID, "--force", "--delay", "1"],
         ("replay", (ID,), {"delay": 1.0, "force": True})),
        (["backlog", "replay", "--service", "s", "--state", "failed"],
         ("replay_where", (), {"service": "s", "state": "failed", "force": False})),
        (["services", "list"], ("services", (), {})),
        (["services", "show", "s"], ("get_service", ("s",), {})),
        (["services", "delete", "s"], ("delete_service", ("s",), {})),
        (["schedules", "list"], ("schedules_page", (), {"limit": 100})),
        (["schedules", "list", "--limit", "2", "--cursor", "n"],
         ("schedules_page", (), {"limit": 2, "cursor": "n"})),
        (["schedules", "show", "n"], ("get_schedule", ("n",), {})),
            (["submit", "s", "--tag", "a", "--tag", "b"],
             ("submit", ("s", None), {"tags": ("a", "b")})),
            (["cancel", "--tag", "a", "--yes"], ("cancel_where", (), {"tag": ("a",)})),
            (["backlog", "list", "--tag", "a"], ("backlog", (), {"tag": ("a",), "limit": 100})),
        (["schedules", "put", "n", "s", "[1]", "--cron", "0 3 * * *", "--tz", "UTC"],
         ("put_schedule", ("n", "s", Json("[1]")),
          {"cron": "0 3 * * *", "tz": "UTC", "enabled": True})),
        (["schedules", "put", "n", "s", "--interval", "30s", "--missed", "skip", "--disabled"],
         ("put_schedule", ("n", "s", None),
          {"interval": 30.0, "missed": "skip", "enabled": False})),
        (["schedules", "delete", "n"], ("delete_schedule", ("n",), {})),
        (["nodes", "list"], ("nodes", (), {})),
        (["nodes", "drain", "n-1"], ("drain_node", ("n-1",), {})),
        (["nodes", "drain", "n-1", "--undo"], ("undrain_node", ("n-1",), {})),
        (["shards"], ("shards", (), {})),
        (["audit", "--limit", "5"], ("audit", (), {"limit": 5})),
    ],
)  # fmt: skip
def test_a_command_is_one_call_of_the_client(run, client, words, call):
    for form in ("--json", "--table"):
        client.calls.clear()
        ran = run(*words, form)
        assert (ran.code, ran.err) == (0, "")
        assert client.calls == [call]


def test_the_server_the_token_and_the_namespace_are_flags_or_variables(run, client, monkeypatch):
    run("list")
    assert client.made[0] == ("http://127.0.0.1:7380", None, None)
    monkeypatch.setenv("TICKWHEEL_SERVER", "http://a")
    monkeypatch.setenv("TICKWHEEL_TOKEN", "t")
    monkeypatch.setenv("TICKWHEEL_NAMESPACE", "n")
    run("list")
    assert client.made[0] == ("http://a", "t", "n")
    run("list", "--server", "http://b", "--token", "u", "--namespace", "m")
    assert client.made[0] == ("http://b", "u", "m")


def test_an_invalid_server_is_a_usage_error_and_a_token_without_tls_a_warning(run):
    ran = run("list", "--server", "nowhere")
    assert ran.code == 2
    assert "http://HOST:PORT" in ran.err
    ran = run("list", "--server", "http://nowhere.invalid:1", "--token", "hunter2")
    assert ran.code == 7
    assert ran.err.startswith("warning: ")
    assert "hunter2" not in ran.err


def test_the_output_of_services_show_can_be_put_under_another_name(run, client, tmp_path):
    client.answers["get_service"] = service(endpoint="https://a.example/", problem="no key")
    shown = run("services", "show", "sums").out
    (tmp_path / "service.json").write_text(shown)
    client.calls.clear()
    assert run("services", "put", "copy", "--from", "@service.json", "--replace").code == 0
    assert client.calls == [("put_service", ("copy",), given(service(**json.loads(shown)).config))]


def given(config):
    return {name: value for name, value in config.items() if value is not None}


def test_a_payload_comes_from_a_file_or_stdin(run, client, tmp_path):
    (tmp_path / "p.json").write_text('{"é": 1}', "utf-8")
    run("submit", "s", f"@{tmp_path}/p.json")
    run("submit", "s", "-", stdin="[2]\n")
    assert [args[1] for _, args, _ in client.calls] == [Json('{"é": 1}'), Json("[2]")]


def test_a_file_name_without_its_at_sign_gets_a_hint(run, client, tmp_path):
    (tmp_path / "service.json").write_text("{}")
    ran = run("services", "put", "s", "--from", "service.json")
    assert ran.code == 2
    assert "to read a file, type @service.json" in ran.err
    ran = run("services", "put", "s", "--from", "away.json")
    assert ran.err.endswith("; to read a file, type @away.json (try 'root services put --help')\n")
    assert "quotes" not in run("services", "put", "s", "--from", "text").err
    assert "needs its quotes" in run("submit", "s", "text").err
    assert "needs its quotes" in run("submit", "s", "x" * 5000).err


@pytest.mark.parametrize("text", ["text", "NaN", "{'a': 1}", "@gone.json", "[" * 100_000])
def test_an_invalid_payload_is_refused_without_a_request(run, client, text):
    ran = run("submit", "s", text)
    assert ran.code == 2
    assert not client.calls


def test_json_output_includes_fields_unknown_to_this_version(run, client):
    client.answers["get"] = task(news="from a later version")
    assert run("show", ID).json["news"] == "from a later version"


def test_quiet_prints_the_id(run, client):
    assert run("submit", "sums", "-q").out == f"{ID}\n"


def test_a_table_escapes_control_characters_and_markup(run, client):
    client.answers["list"] = Page([task(key="k\x1b[2J", error="[bold]boom[/bold]")], None)
    out = run("list", "--table").out
    assert ID in out
    assert "k\\x1b[2J" in out
    assert "\x1b" not in out
    assert "[bold]boom[/bold]" in out


def test_a_control_character_in_a_key_is_shown_escaped(run, client):
    client.answers["list"] = Page([task(key="schedule:p\x1f17")], None)
    assert "schedule:p\\x1f17" in run("list", "--table").out


def test_a_table_shows_the_beginning_of_a_huge_value(run, client):
    client.answers["get"] = task(error="#" * 1_000_000)
    out = "".join(run("show", ID, "--table").out.split())
    assert "#…and934,464charactersmore;--jsonprintsallofthem" in out
    assert out.count("#") == 65_536


def test_a_table_fits_the_terminal_without_cutting_anything(run, client, monkeypatch):
    error = "boom " * 50 + "bang"
    rows = [task(key="order:o-1", error=error, attempt=2), task(service="x" * 9), task()]
    client.answers["list"] = Page(rows, None)
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("list", "--table").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["id", "service", "state", "due_at"]
    assert lines[2].split() == [ID, "sums", "delay", "2030-01-31T12:00:00Z"]
    text = " ".join(" ".join(lines).split())
    assert f"key order:o-1 attempt 2 error {error}" in text
    assert [line.split()[1] for line in lines[-2:]] == ["x" * 9, "sums"]
    monkeypatch.setenv("COLUMNS", "20")
    assert ID in run("list", "--table").out


def test_a_list_omits_the_attempt_column_when_all_are_1(run, client, monkeypatch):
    client.answers["list"] = Page([task(attempt=1, state="finished")] * 2, None)
    assert "attempt" not in run("list", "--table").out
    client.answers["list"] = Page([task(attempt=1), task(attempt=2)], None)
    assert [line.split()[-1] for line in run("list", "--table").out.splitlines()[2:]] == ["1", "2"]
    monkeypatch.setenv("COLUMNS", "70")
    lines = run("list", "--table").out.splitlines()
    assert [line.split() for line in lines[4:]] == [["attempt", "2"]]
    assert len(lines) == 5


def test_a_row_is_one_line_when_the_width_is_unknown(run, client):
    client.answers["list"] = Page([task(key="k" * 50, error="e" * 60, attempt=2)] * 2, None)
    lines = run("list", "--table").out.splitlines()
    assert len(lines) == 4
    assert lines[2].split()[-1] == "e" * 60


def test_json_escapes_what_a_terminal_or_utf_8_cannot_take(run, client):
    odd = "a\x1b\x9b\u202e\ud800é"
    client.answers["get"] = task(payload=odd)
    ran = run("show", ID)
    assert ran.json["payload"] == odd
    assert not {"\x1b", "\x9b", "\u202e", "\ud800"} & set(ran.out)
    assert "é" in ran.out
    assert run("show", ID, "--table").code == 0


def test_a_task_is_shown_with_its_attempts(run, client):
    assert run("show", ID, "--attempts").json["attempts"] == []
    assert "started_at" in run("show", ID, "--attempts", "--table").out


def test_attempts_show_the_node_only_if_it_changed_and_the_whole_error(run, client):
    error = "127.0.0.1 answered 409: " + "x" * 200 + " the bank is closed"
    row = {"event": "retry", "node": "n-1", "epoch": 1, "started_at": AT, "ended_at": AT}
    log = [Attempt.of(row | {"attempt": n, "error": error}) for n in (1, 2)]
    client.answers["attempts"] = log
    out = run("show", ID, "--attempts", "--table").out
    assert out.count("the bank is closed") == 2
    assert "n-1" not in out
    client.answers["attempts"] = [log[0], Attempt.of(log[1].document | {"node": "n-2"})]
    out = run("show", ID, "--attempts", "--table").out
    assert "n-1" in out
    assert "n-2" in out


def test_attempts_show_where_their_messages_are_if_they_have_any(run, client):
    row = {"event": "finish", "node": "n-1", "epoch": 1, "started_at": AT, "ended_at": AT}
    client.answers["attempts"] = [Attempt.of(row | {"attempt": 1, "delivered_to": None})]
    assert "delivered_to" not in run("show", ID, "--attempts", "--table").out
    place = {"stream": "orders", "id": "7-0"}
    client.answers["attempts"] = [Attempt.of(row | {"attempt": 1, "delivered_to": place})]
    assert '{"stream": "orders", "id": "7-0"}' in run("show", ID, "--attempts", "--table").out


def test_a_lost_verdict_is_exit_code_4(run, client):
    client.answers["cancel"] = Verdict(ID, False, State.RUNNING)
    ran = run("cancel", ID)
    assert (ran.code, ran.json) == (4, {"id": ID, "won": False, "state": "running"})
    ran = run("cancel", ID, "--table")
    assert (ran.code, ran.out) == (4, f"{ID} not cancelled: it is running\n")


def test_a_key_that_no_waiting_task_has_is_exit_code_3(run, client):
    client.answers["cancel_where"] = 0
    ran = run("cancel", "--key", "k", "--json")
    assert (ran.code, ran.json) == (3, {"cancelled": 0})
    problem = {"code": "unknown_task", "detail": "no task that waits has the key 'k'"}
    assert json.loads(ran.err) == problem
    ran = run("cancel", "--key", "k", "--table")
    assert (ran.code, ran.out) == (3, "cancelled 0\n")
    assert ran.err.startswith("error: no task that waits has the key 'k' (")
    assert "--server" in ran.err
    assert run("cancel", "--service", "s", "--yes").code == 0


def test_cancelling_all_tasks_of_a_service_needs_yes(run, client):
    ran = run("cancel", "--service", "s")
    assert ran.code == 2
    assert "--yes" in ran.err
    assert not client.calls
    assert run("cancel", "--service", "s", "--yes").json == {"cancelled": 3}


def test_delay_and_due_at_exclude_each_other(run, client):
    for words in (["submit", "s"], ["reschedule", ID], ["backlog", "replay", ID]):
        ran = run(*words, "--delay", "5s", "--due-at", AT)
        assert ran.code == 2
        assert ran.err.startswith("error: give --delay or --due-at, not both")
    assert not client.calls


def test_several_ids_are_cancelled_one_by_one(run, client):
    assert len(run("cancel", ID, "0" * 32, "--json").lines) == 2


def test_cancelled_ids_are_printed_before_an_error(run, client):
    verdicts = iter([Verdict(ID, True, State.CANCELLED)])
    client.cancel = lambda _: next(verdicts, None) or client.get(_)
    client.answers["get"] = UnknownTask("no task")
    ran = run("cancel", ID, "0" * 32)
    assert (ran.code, len(ran.lines)) == (3, 1)


def pages(count):
    return [Page([task(key=str(n))], str(n) if n < count else None) for n in range(1, count + 1)]


def test_all_reads_every_page(run, client):
    client.answers["list"] = pages(3)
    ran = run("list", "--all")
    assert [line["key"] for line in ran.lines] == ["1", "2", "3"]
    assert [call[2].get("cursor") for call in client.calls] == [None, "1", "2"]
    assert ran.err == ""


def test_a_limit_that_a_program_set_ends_the_list_silently(run, client):
    client.answers["list"] = pages(3)
    ran = run("list", "--limit", "2")
    assert len(ran.lines) == 2
    assert ran.err == ""
    assert [call[2]["limit"] for call in client.calls] == [2, 1]


def test_without_a_limit_a_line_after_the_table_says_that_there_are_more(run, client, monkeypatch):
    client.answers["list"] = Page([task()] * 100, "c")
    assert run("list").err == "there are more: --cursor c, or --all\n"
    order = []
    monkeypatch.setattr(click, "echo", lambda *args, **options: order.append("more"))
    monkeypatch.setattr(Output, "table", lambda *args: order.append("table"))
    run("list", "--table")
    assert order == ["table", "more"]


def test_on_a_terminal_a_truncated_list_always_says_so(run, client, monkeypatch):
    client.answers["list"] = pages(3)
    monkeypatch.setattr(remote, "sys", SimpleNamespace(stderr=SimpleNamespace(isatty=lambda: True)))
    assert run("list", "--limit", "2").err == "there are more: --cursor 2, or --all\n"


def test_the_limit_may_exceed_one_page(run, client):
    run("list", "--limit", "2500")
    assert client.calls[0][2]["limit"] == 1000


@pytest.mark.parametrize("enabled", [True, False])
def test_enable_and_disable_keep_the_other_fields(run, client, enabled):
    client.answers["get_service"] = service(enabled=not enabled)
    assert run("services", "enable" if enabled else "disable", "sums").code == 0
    verb, args, config = client.calls[-1]
    assert (verb, args, config["enabled"]) == ("put_service", ("sums",), enabled)
    assert config["secret"] == "********"
    assert config["headers"] == {"x-a": "********"}
    assert config["version"] == 1
    assert not {"name", "updated_at"} & set(config)


@pytest.mark.parametrize("words", [["disable", "sums"], ["put", "sums", "--disabled"]])
def test_a_concurrent_change_of_a_service_is_kept(run, client, words):
    reads = [service(), service(version=2, rate=5)]
    client.get_service = lambda name: reads.pop(0)
    put = client.put_service

    def put_service(name, **config):
        answer = put(name, **config)
        if reads:
            raise ServiceChanged("it has version 2")
        return answer

    client.put_service = put_service
    assert run("services", *words).code == 0
    first, second = (config for _, _, config in client.calls)
    assert (first["version"], second["version"]) == (1, 2)
    assert (second["rate"], second["enabled"]) == (5, False), "what the other has changed stays"


def test_a_service_that_keeps_changing_ends_in_a_conflict(run, client):
    client.answers["put_service"] = ServiceChanged("it has version 7")
    assert run("services", "disable", "sums").code == 4


def test_put_changes_given_fields_and_keeps_the_others(run, client):
    run("services", "put", "sums", "--rate", "5", "--backoff-first", "2s")
    config = client.calls[-1][2]
    assert config["rate"] == 5
    assert config["backoff"] == {"first": 2.0, "factor": 2.0, "max": 3600.0, "jitter": 0.1}
    assert config["endpoint"] == "https://shop.example/"
    assert config["secret"] == "********"


def test_put_creates_a_missing_service(run, client):
    client.answers["get_service"] = UnknownService("none")
    words = ["--endpoint", "http://h/", "--breaker-failures", "3", "--header", "X-A: b: c"]
    run("services", "put", "new", *words)
    config = client.calls[-1][2]
    assert config == {
        "endpoint": "http://h/", "breaker": {"failures": 3}, "headers": {"X-A": "b: c"},
        "version": 0,
    }  # fmt: skip


def test_a_new_service_needs_an_endpoint(run, client):
    client.answers["get_service"] = UnknownService("none")
    ran = run("services", "put", "new", "--rate", "5")
    assert ran.code == 2
    assert ran.err.startswith("error: a new service, and --replace, need --endpoint")
    assert [call[0] for call in client.calls] == ["get_service"]


def test_put_with_replace_starts_from_the_defaults(run, client):
    run(
        "services", "put", "sums", "--replace", "--from", '{"endpoint": "http://h/"}', "--rate", "1"
    )
    assert client.calls == [("put_service", ("sums",), {"endpoint": "http://h/", "rate": 1.0})]


def test_a_generated_secret_is_printed_and_may_keep_the_old_one(run, client):
    ran = run("services", "put", "sums", "--generate-secret")
    made = client.calls[-1][2]["secret"]
    assert made.startswith("whsec_")
    assert ran.json["secret"] == made
    run("services", "put", "sums", "--generate-secret", "--keep-old")
    new, old = client.calls[-1][2]["secret"]
    assert new != made
    assert old == "********"


def test_only_no_secret_and_no_headers_remove_them(run, client):
    run("services", "put", "sums", "--no-secret")
    config = client.calls[-1][2]
    assert (config["secret"], config["headers"]) == (None, {"x-a": "********"})
    run("services", "put", "sums", "--no-headers")
    config = client.calls[-1][2]
    assert (config["secret"], config["headers"]) == ("********", {})
    run("services", "put", "sums", "--replace", "--endpoint", "http://h/", "--no-secret")
    assert client.calls[-1][2] == {"endpoint": "http://h/", "secret": None}


@pytest.mark.parametrize(
    "words",
    [
        ["--no-secret", "--generate-secret"],
        ["--no-secret", "--secret", "-"],
        ["--no-secret", "--keep-old"],
        ["--no-headers", "--header", "a: b"],
    ],
)
def test_removing_and_setting_at_once_is_refused(run, client, words):
    assert run("services", "put", "sums", *words).code == 2
    assert client.calls == []


def test_a_secret_is_read_from_a_file(run, client, tmp_path):
    (tmp_path / "s").write_text("whsec_abc\n")
    ran = run("services", "put", "sums", "--secret", f"@{tmp_path}/s")
    assert client.calls[-1][2]["secret"] == "whsec_abc"
    assert "whsec_abc" not in ran.out


def test_a_value_that_the_client_refuses_is_a_usage_error(run, client):
    client.answers["get"] = ValueError("'' is no name and no id")
    ran = run("show", "")
    assert (ran.code, ran.err.startswith("error: '' is no name")) == (2, True)


def test_a_second_replay_is_exit_code_4(run, client):
    client.answers["replay"] = ApiError("twice", code="already_replayed", status=409)
    assert run("backlog", "replay", ID).code == 4


def test_submit_many_sends_lines_and_prints_an_answer_for_each(run, client):
    lines = '{"service": "s", "payload": 1}\n\n{"payload": 2}\n'
    ran = run("submit-many", "-", "--service", "t", "--batch", "7", stdin=lines)
    assert ran.code == 0
    assert [call[1][0]["service"] for call in client.calls] == ["s", "t"]
    assert {call[2]["batch"] for call in client.calls} == {7}
    assert [line["id"] for line in ran.lines] == [ID, ID]
    assert ran.err == "stored 2, refused 0\n"


def test_submit_many_continues_after_a_refusal_and_exits_with_its_code(run, client, tmp_path):
    problem = {"code": "key_taken", "status": 409, "detail": "d"}
    client.answers[Json("2")] = ApiError("taken", code="key_taken", status=409, problem=problem)
    tasks = tmp_path / "tasks.json"
    tasks.write_text(json.dumps([{"service": "s", "payload": n} for n in (1, 2, 3)]))
    ran = run("submit-many", tasks)
    assert ran.code == 4
    assert ran.lines[1] == {"problem": problem}
    assert ran.err == "stored 2, refused 1\n"
    ran = run("submit-many", tasks, "--table")
    assert ran.out == "stored 2, refused 1\n"
    assert ran.err == "error: task 2: taken (key_taken)\n"


def test_submit_many_sends_the_tasks_before_an_invalid_line(run, client):
    ran = run("submit-many", "-", stdin='{"service": "s"}\n\n{"service":\n{"service": "s"}\n')
    assert ran.code == 5
    assert len(ran.lines) == len(client.calls) == 1
    stored, error = ran.err.splitlines()
    assert stored == "stored 1, refused 0"
    assert error == "error: line 3 cannot be read: Expecting value, at column 12 (invalid)"

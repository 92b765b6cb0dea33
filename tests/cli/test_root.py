"""The root of the command line: commands, their help, exit codes and error messages."""

import json
import os
import pty
import subprocess
import sys

import click
import pytest

from tickwheel import errors
from tickwheel.cli import exit_codes
from tickwheel.cli.root import COMMANDS, root
from tickwheel.client import ApiError, ServerUnavailable
from tickwheel.client.errors import error_of

ID = "0198c0de00007000a1b2c3d4e5f60718"


def every_command(group=root, path=()):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from every_command(command, (*path, name))
        yield (*path, name), command


ALL = dict(every_command())
LEAVES = {path: c for path, c in ALL.items() if not isinstance(c, click.Group)}


def test_the_list_of_commands():
    assert set(COMMANDS) == {
        "serve", "submit", "submit-many", "show", "list", "cancel", "reschedule", "feedback",
        "services", "backlog", "schedules", "tokens", "nodes", "shards", "top", "bench", "lab",
        "migrate", "config", "audit", "completion", "consume", "dashboard", "doctor", "worker",
    }  # fmt: skip


def test_the_list_of_subcommands():
    verbs = {}
    for path in ALL:
        if len(path) == 2:
            verbs.setdefault(path[0], set()).add(path[1])
    assert verbs == {
        "services": {"list", "show", "put", "delete", "enable", "disable"},
        "backlog": {"list", "replay"},
        "schedules": {"list", "show", "put", "delete"},
        "tokens": {"create", "list", "revoke"},
        "nodes": {"list", "drain"},
    }


def test_a_commands_line_in_the_root_help_is_the_first_of_its_own():
    firsts = {name: ALL[name,].help.partition("\n")[0] for name in COMMANDS}
    assert firsts == {name: lazy.help for name, lazy in COMMANDS.items()}


def test_every_command_has_help_with_an_example_of_itself(run):
    for path in LEAVES:
        ran = run(*path, "--help")
        assert ran.code == 0, path
        assert f"tickwheel {' '.join(path)}" in ran.out.partition("Examples:")[2], path


def test_every_command_that_prints_data_takes_json():
    without = {
        path
        for path, command in LEAVES.items()
        if not any("--json" in parameter.opts for parameter in command.params)
    }
    assert without == {("serve",), ("worker",), ("dashboard",), ("completion",), ("lab",)}


def test_help_imports_no_command_and_no_large_module():
    program = """
import sys
from tickwheel.cli.root import root
try:
    root.main(["--help"], prog_name="tickwheel")
except SystemExit as end:
    assert end.code == 0
big = {"rich", "asyncio", "ssl", "http", "tickwheel.durable", "tickwheel.client"}
print(sorted(big & set(sys.modules)), file=sys.stderr)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, text=True, check=False
    )
    assert ran.stderr.strip() == "[]"
    assert "submit-many" in ran.stdout


def test_it_runs_as_a_module():
    argv = [sys.executable, "-m", "tickwheel", "--version"]
    ran = subprocess.run(argv, capture_output=True, timeout=60, text=True, check=False)
    assert ran.returncode == 0
    assert ran.stdout.startswith("tickwheel 0")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")  # noqa: PTH110
@pytest.mark.parametrize("words", [["--version"], ["config", "--table"], ["config", "--json"]])
def test_a_full_disk_is_one_line(words):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        ran = subprocess.run(
            [sys.executable, "-m", "tickwheel", *words],
            stdout=full, stderr=subprocess.PIPE, timeout=60, text=True, check=False,
        )  # fmt: skip
    assert ran.stderr == "error: cannot write: No space left on device\n"
    assert ran.returncode == exit_codes.OTHER


def test_without_click_the_error_names_the_extra():
    program = """
import sys
sys.modules["click"] = None
from tickwheel.cli import main
main()
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, text=True, check=False
    )
    assert ran.returncode == 1
    assert "pip install 'tickwheel[cli]'" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["nope"], ["show"], ["show", ID, "more"], ["submit", "s", "{"], ["--odd"],
        ["submit", "s", "--delay", "x"],
        ["submit", "s", "--delay", "-1"], ["reschedule", ID], ["list", "--state", "odd"],
        ["reschedule", ID, "--delay", "1", "--due-at", "2030-01-31T12:00:00Z"], ["cancel"],
        ["cancel", ID, "--key", "k"], ["feedback", ID, "finished"], ["backlog", "replay"],
        ["submit", "s", "--due-at", "2030-01-31T12:00:00"], ["submit", "s", "--due-at", "tomorrow"],
        ["submit-many", "/nonexistent.json"], ["schedules", "put", "n", "s"],
        ["services", "put", "s", "--header", "x"], ["services", "put", "s", "--keep-old"],
        ["services", "put", "s", "--from", "[1]"], ["tokens", "create", "n", "--namespace", "a/b"],
        ["serve", "--workers", "many"], ["config", "--config", "gone.toml"],
    ],
)  # fmt: skip
def test_a_usage_error_is_one_line_with_exit_code_2(run, client, words):
    ran = run(*words)
    assert ran.code == exit_codes.USAGE
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1
    assert ran.out == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UnknownTask("no task"), 3),
        (error_of({"code": "unknown_service", "status": 404}, 404), 3),
        (error_of({"code": "unknown_service", "status": 422}, 422), 5),
        (errors.KeyTaken("taken", ID), 4),
        (errors.ServiceInUse("live tasks"), 4),
        (errors.TargetRefused("private"), 5),
        (ApiError("bad", code="bad_request", status=400), 5),
        (ApiError("who", code="unauthorized", status=401), 6),
        (ApiError("no", code="forbidden", status=403), 6),
        (ServerUnavailable("refused"), 7),
        (errors.StoreUnavailable("gone"), 7),
        (errors.Overloaded("much"), 7),
        (ApiError("down", code="bad_answer", status=502), 7),
        (ApiError("slow", code="rate_limited", status=429), 8),
        (ApiError("oops", code="internal", status=500), 1),
        (ApiError("garbage", code="bad_answer", status=200), 1),
        (ApiError("a web server", code="bad_answer", status=404), 1),
        (ApiError("a proxy", code="bad_answer", status=403), 6),
        (errors.TickwheelError("odd"), 1),
    ],
    ids=lambda value: getattr(value, "code", None),
)
def test_an_error_is_one_line_with_its_exit_code(run, client, error, code):
    client.answers["get"] = error
    ran = run("show", ID)
    assert ran.code == code
    assert ran.err.startswith(f"error: {error} ({error.code}")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("words", [(), ("services",)])
def test_without_a_command_the_help_is_printed(run, words):
    ran = run(*words)
    assert ran.code == exit_codes.USAGE
    assert ran.err.startswith("Usage: ")
    assert "error" not in ran.err
    assert "(try" not in ran.err


def test_a_mistyped_command_gets_a_suggestion(run):
    assert "No such command 'submt'. Did you mean 'submit'" in run("submt").err
    assert "Did you mean" not in run("xyz").err


def test_an_error_names_the_flag_that_helps(run, client):
    client.answers["get"] = ApiError("a token is needed", code="unauthorized", status=401)
    assert "--token or TICKWHEEL_TOKEN" in run("show", ID).err
    client.answers["replay"] = errors.AlreadyReplayed("use force")
    assert "--force" in run("backlog", "replay", ID).err
    client.answers["get"] = ServerUnavailable("cannot connect")
    assert "is it running? --server or TICKWHEEL_SERVER" in run("show", ID).err


def test_an_option_before_the_command_gets_a_hint(run):
    ran = run("--server", "http://127.0.0.1:1", "list")
    assert ran.code == exit_codes.USAGE
    assert ran.err.endswith("Options go after the command: tickwheel COMMAND --server …\n")
    assert ran.err.count("\n") == 1


def test_a_store_given_to_a_command_that_asks_a_server_gets_a_hint(run):
    ran = run("cancel", "--key", "k", "--store", "sqlite:///jobs.db")
    assert ran.code == exit_codes.USAGE
    assert "start 'tickwheel dashboard --store URL'" in ran.err
    assert "tickwheel dashboard" not in run("lab", "--store", "sqlite:///jobs.db").err


@pytest.mark.parametrize(
    ("more", "red"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, False),
     ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": ""}, True)],
)  # fmt: skip
def test_an_error_on_a_terminal_is_red_unless_colours_are_off(more, red):
    environ = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    leader, follower = pty.openpty()
    with os.fdopen(leader, "rb", buffering=0) as screen:
        ran = subprocess.run(
            [sys.executable, "-m", "tickwheel", "submit"], stderr=follower, timeout=60,
            env=environ | more, check=False,
        )  # fmt: skip
        os.close(follower)
        output = screen.read(4096)
    assert ran.returncode == exit_codes.USAGE
    assert b"error:" in output
    assert (b"\x1b[" in output) == red


@pytest.mark.parametrize("form", ["--table", "--json"])
def test_characters_missing_in_stdouts_encoding_are_escaped(form, tmp_path):
    (tmp_path / "tickwheel.toml").write_text('node = "né"', "utf-8")
    ran = subprocess.run(
        [sys.executable, "-m", "tickwheel", "config", form], capture_output=True, timeout=60,
        env=os.environ | {"PYTHONIOENCODING": "ascii"}, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert (b"n\\xe9" if form == "--table" else b"n\\u00e9") in ran.stdout


def test_every_error_code_has_an_exit_code_unless_only_programs_see_it():
    own = {"tickwheel_error", "time_went_back", "wheel_busy", "timer_closed", "not_started"}
    codes = {error.code for error in vars(errors).values() if isinstance(error, type)}
    assert codes - set(exit_codes.EXIT_CODES) == own


def test_with_json_an_error_is_the_problem_document(run, client):
    problem = {"code": "key_taken", "status": 409, "title": "Conflict", "holder": ID, "detail": "d"}
    client.answers["submit"] = error_of(problem, 409)
    ran = run("submit", "sums", "--json")
    assert ran.code == 4
    assert json.loads(ran.err) == problem
    client.answers["submit"] = ServerUnavailable("refused")
    ran = run("submit", "sums", "--json")
    assert json.loads(ran.err) == {"code": "server_unavailable", "detail": "refused"}


def test_an_error_shows_its_notes_and_no_control_characters(run, client):
    error = ApiError("a\x1b[31m\nb", code="internal", status=500)
    error.add_note("request id r-1")
    client.answers["get"] = error
    assert run("show", ID).err == "error: a\\x1b[31m b (internal; request id r-1)\n"


def test_ctrl_c_is_exit_code_130(run, client):
    client.answers["get"] = KeyboardInterrupt()
    assert run("show", ID).code == exit_codes.INTERRUPTED


def test_an_unexpected_error_is_not_hidden(run, client):
    client.answers["get"] = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        run("show", ID)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_the_shells_script(run, shell):
    ran = run("completion", shell)
    assert ran.code == 0
    assert "_TICKWHEEL_COMPLETE" in ran.out


def complete(monkeypatch, words):
    monkeypatch.setenv("_TICKWHEEL_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    from click.testing import CliRunner

    result = CliRunner().invoke(root, [], prog_name="tickwheel")
    return {line.partition(",")[2] for line in result.stdout.split()}


def test_commands_and_names_are_completed(client, monkeypatch):
    assert complete(monkeypatch, "tickwheel sub") == {"submit", "submit-many"}
    assert complete(monkeypatch, "tickwheel submit su") == {"sums"}
    assert complete(monkeypatch, "tickwheel schedules show ni") == {"nightly"}


def test_without_a_server_completion_of_names_is_silent(client, monkeypatch):
    client.answers["services"] = ServerUnavailable("refused")
    assert complete(monkeypatch, "tickwheel submit su") == set()

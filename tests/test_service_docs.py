"""The pages on the service agree with the code: tables, names and examples."""

import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import tickwheel.client
import tickwheel.errors
from tickwheel.cli import exit_codes
from tickwheel.client import AsyncClient, Client
from tickwheel.config import SETTINGS
from tickwheel.durable.channels.headers import headers_of, service_headers
from tickwheel.durable.channels.http.channel import answer_to, plan_for
from tickwheel.durable.histogram import Histogram
from tickwheel.durable.permits.flow import Flow
from tickwheel.http import Response
from tickwheel.values.service import Backoff, Breaker, Service
from tickwheel.values.task import FAILURE_EVENTS, Event
from tickwheel.web.app import ROUTES
from tickwheel.web.problems import STATUS

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
CODE = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^\s*print\(.*\)  # (.*)$", re.MULTILINE)
SECONDS = 60


def page(name):
    return (DOCS / f"{name}.md").read_text("utf-8")


def rows(text, heading):
    """Return the cells of the first table after `heading`, without their backticks."""
    table = []
    for line in text[text.index(heading) :].splitlines():
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.strip("|"))
            table.append([cell.strip().strip("`") for cell in cells])
        elif table:
            break
    return table[2:]


ERRORS = page("reference/errors")
OPERATE = page("how-to/service-operate")
ALERTS = (DOCS / "how-to" / "alerts.yml").read_text("utf-8")
RECEIVE = page("how-to/service-receive")
CLIENTS = page("how-to/service-clients")
REFERENCE = page("reference/client")


def test_every_code_is_in_the_table_with_its_status_and_exit_code():
    listed = {row[0]: (int(row[1]), int(row[2])) for row in rows(ERRORS, "<!-- codes -->")}
    assert listed == {
        code: (status, exit_codes.exit_code_of_status(status)) for code, status in STATUS.items()
    }


def test_every_code_of_the_command_line_is_in_one_of_the_tables():
    alone = {row[0]: int(row[1]) for row in rows(ERRORS, "<!-- codes without a status -->")}
    listed = alone.keys() | {row[0] for row in rows(ERRORS, "<!-- codes -->")}
    assert set(exit_codes.EXIT_CODES) <= listed
    for code, number in alone.items():
        assert exit_codes.EXIT_CODES.get(code, exit_codes.OTHER) == number


def test_the_errors_that_the_table_names_are_those_that_the_client_raises():
    for code, status, _, name, _ in rows(ERRORS, "<!-- codes -->"):
        raised = tickwheel.client.errors.error_of({"code": code}, int(status))
        assert type(raised).__name__ == (name or "ApiError"), code
        assert raised.code == code


def test_every_setting_is_in_the_table_with_its_default_and_meaning():
    listed = [tuple(row) for row in rows(OPERATE, "<!-- settings -->")]
    assert listed == [(s.name, shown(s.mask(s.default)), s.help) for s in SETTINGS]


def shown(default):
    if default in (None, []):
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def test_every_metric_is_in_the_table(server):
    import urllib.request

    with urllib.request.urlopen(f"{server}/metrics", timeout=SECONDS) as answer:
        text = answer.read().decode()
    given = re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE)
    listed = {row[0]: row[1] for row in rows(OPERATE, "<!-- metrics -->")}
    assert list(listed) == [name for name, _ in given]
    for name, kind in given:
        assert listed[name].startswith("histogram") == (kind == "histogram"), name


def test_every_metric_that_the_alerts_name_exists_with_its_labels(server):
    import urllib.request

    with Client(server) as client:  # a service that was called has all of them
        client.put_service("called", endpoint="http://127.0.0.1:9/", max_attempts=1)
        client.submit("called")
    for _ in range(600):
        with urllib.request.urlopen(f"{server}/metrics", timeout=SECONDS) as answer:
            text = answer.read().decode()
        if "\ntickwheel_breaker{" in text:
            break
        time.sleep(0.1)
    text += '\ntickwheel_worker_up{worker="0"} 1\n'  # with several workers only
    assert ALERTS.count("- alert: ") == ALERTS.count(" expr: ") >= 8
    for metric, braces in re.findall(r"\b(tickwheel_\w+)(\{.*?\})?", ALERTS):
        samples = re.findall(rf"^{metric}(?:\{{.*\}})? ", text, re.MULTILINE)
        assert samples, metric
        for label, words in re.findall(r'(\w+)=~?"([^"]+)"', braces):
            for word in words.split("|"):
                listed = f'{label}="{word}"' if label != "status" else f'{label}="'
                assert any(listed in sample for sample in samples), (metric, listed)


def test_every_scope_is_in_the_table():
    listed = {row[0] for row in rows(OPERATE, "| scope |")}
    assert listed == {route.scope for route in ROUTES if route.scope}


@pytest.mark.parametrize("row", rows(RECEIVE, "<!-- statuses -->")[:-1], ids=lambda row: row[0])
def test_a_status_means_what_the_table_says(row):
    statuses, _, failure, health = row
    plan = plan_for(Service("orders", "http", endpoint="https://shop.example/"), Histogram())
    for status in map(int, re.findall(r"\d{3}", statuses)):
        answer = answer_to(Response(status, [], b"", True), plan, 0)
        assert (answer.event in FAILURE_EVENTS) == (failure == "yes")
        assert answer.gone == (health == "gone")
        assert answer.healthy == {"well": True, "not well": False, "gone": None}[health]
        assert (answer.event is Event.ACCEPT) == (status == 202)


def test_the_last_attempt_comes_when_the_table_says():
    table = rows(RECEIVE, "<!-- outages -->")
    assert table[0][0] == f"{Service('orders', 'http').max_attempts}, the default"
    backoff, units = Backoff(jitter=0), {"h": 3600, "min": 60, "s": 1}
    for attempts, after in table:
        waits = map(backoff.seconds, range(1, int(attempts.partition(",")[0])))
        parts = re.findall(r"(\d+) (\w+)", after)
        assert sum(int(number) * units[unit] for number, unit in parts) == sum(waits), attempts
    assert [backoff.seconds(failures) for failures in (12, 13)] == [2048, 3600]  # "beyond 13"


def test_every_header_of_a_call_is_in_the_table():
    secret = "whsec_" + "c2VjcmV0LW9mLXRoZS10ZXN0cy10aGF0LW5vYm9keS1zZWVz"
    service = Service("orders", "http", endpoint="https://shop.example/", secrets=(secret,))
    task = SimpleNamespace(id="1", attempt=1, due_at_ms=0, epoch=1, body=b"{}")
    sent = {name for name, _ in headers_of(task, service, service_headers(service), 0)}
    assert {row[0] for row in rows(RECEIVE, "<!-- headers -->")} | {"content-type"} == sent


def test_the_verbs_of_both_clients_are_on_the_page():
    cells = " ".join(f"`{row[1]}`" for row in rows(CLIENTS, "## Verbs"))
    listed = set(re.findall(r"`(\w+)`", cells))
    for client in (Client, AsyncClient):
        verbs = {name for name in dir(client) if not name.startswith("_")}
        assert listed == verbs - {"server", "close"}


def test_every_verb_of_the_client_is_in_the_reference():
    listed = re.findall(r"automethod:: tickwheel\.client\.Client\.(\w+)\(", REFERENCE)
    assert set(listed) == {name for name in dir(Client) if not name.startswith("_")} - {"server"}


def test_the_fields_in_the_reference_are_those_of_the_values():
    for name, cell in rows(REFERENCE, "| | fields |"):
        for field in re.findall(r"`(\w+)`", f"`{cell}`"):
            assert hasattr(getattr(tickwheel.client, name), field), (name, field)


def test_every_extra_that_is_named_anywhere_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    texts = [*DOCS.rglob("*.md"), *(ROOT / "src").rglob("*.py"), ROOT / "README.md"]
    found = " ".join(
        names
        for path in texts
        for names in re.findall(r"(?:tickwheel|\.)\[([\w,]+)\]['\"]", path.read_text("utf-8"))
    )
    assert set(re.findall(r"\w+", found)) <= set(extras["optional-dependencies"])
    assert "server" in found


@pytest.fixture
def server(tmp_path):
    """A server of its own, with the service that the page submits to, which holds its tasks."""
    words = ["--store", f"sqlite:///{tmp_path}/tasks.db", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tickwheel", "serve", *words, "--allow-private-targets"],
        stdout=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    url = process.stdout.readline().split()[-1].rstrip("/")
    with Client(url) as client:
        client.put_service("expire", endpoint="http://127.0.0.1:9/", enabled=False)
    yield url
    process.terminate()
    process.communicate(timeout=SECONDS)


def test_the_code_on_the_page_of_clients_prints_what_it_says(server, capsys, monkeypatch):
    monkeypatch.setenv("TICKWHEEL_SERVER", server)
    code = "\n".join(CODE.findall(CLIENTS))
    exec(compile(code, "service-clients.md", "exec"), {"__name__": "__page__"})
    printed = capsys.readouterr().out.splitlines()
    expected = PRINTED.findall(code)
    assert len(printed) == len(expected)
    for line, listed in zip(printed, expected, strict=True):
        assert re.fullmatch(re.escape(listed).replace("…", ".*"), line)


def test_the_worked_example_of_a_breaker_is_what_a_flow_does():
    service = Service("orders", "http", concurrency=8, breaker=Breaker(failures=3, pause=5.0))
    flow = Flow(service, 0.0)
    seen = []

    def begin(at, count):
        assert flow.free(at) >= count
        return [flow.take(count, at)] * count

    def end(at, turns, *, well):
        for turn in turns:
            flow.record(well, at, turn)
            flow.give(turn)

    def note(at, calls=None):
        seen.append((f"{at:.1f}", str(flow.state), str(flow.free(at) if calls is None else calls)))

    calls = begin(0.0, 3)
    note(0.0, flow.limit)
    end(0.1, calls, well=False)
    note(0.1)
    for at, well in ((5.1, False), (15.2, True)):
        calls = begin(at, flow.free(at))
        note(at, len(calls))
        end(at + 0.1, calls, well=well)
        note(at + 0.1)
    for at in (15.4, 15.5):
        end(at, begin(at, flow.free(at)), well=True)
        note(at)
    listed = rows(page("explanation/service"), "<!-- flow -->")
    assert seen == [(second, state, calls) for second, _, state, calls in listed]

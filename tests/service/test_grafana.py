"""The Grafana dashboard: Prometheus scrapes a real server, and every query of a panel has data."""

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

import servers
from receivers import Receiver
from web.serving import Served

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy/grafana/tickwheel.json"
DASHBOARD = json.loads(FILE.read_text("utf-8"))
QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
]
CONFIG = """
global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}
scrape_configs: [{{job_name: tickwheel, static_configs: [{{targets: ["{target}"]}}]}}]
"""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """Prometheus that scrapes a server which works."""
    program = shutil.which("prometheus")
    assert program, "prometheus is missing: apt-get install prometheus"
    path = tmp_path_factory.mktemp("grafana")
    store = f"sqlite:///{path}/tasks.db"
    made = Served("--store", store, "--allow-private-targets", cwd=path)
    with Receiver() as receiver, made as server:
        server.service("mail", receiver.url("/ok"))
        config = path / "prometheus.yml"
        config.write_text(CONFIG.format(target="{}:{}".format(*server.address)))
        port = servers.free_port()
        command = [
            program, f"--config.file={config}", f"--storage.tsdb.path={path}/data",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        ]  # fmt: skip
        process = subprocess.Popen(command, cwd=path)
        try:
            servers.wait_until(lambda: answers(port, "tickwheel_info"), "a scrape", 60)
            yield lambda query: answers_after_work(server, port, query)
        finally:
            process.terminate()
            process.wait(30)


def answers(port, query):
    """Return the result of a query; nothing while Prometheus does not answer."""
    text = urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/api/v1/query?{text}", timeout=10
        ) as f:
            return json.load(f)["data"]["result"]
    except urllib.error.HTTPError as refused:
        refused.close()
        return []
    except OSError:
        return []


def answers_after_work(server, port, query):
    """Let the server work until the query has a result with a number."""

    def numbers():
        server.submit("mail", delay=0)
        found = [one["value"][1] for one in answers(port, query)]
        return [value for value in found if value != "NaN"]

    servers.wait_until(numbers, query, 60)
    return numbers()


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_of_a_panel_has_data(prometheus, query):
    plain = query.replace("$__rate_interval", "5s").replace("$job", "tickwheel")
    assert "$" not in plain
    assert prometheus(plain)


def test_each_panel_names_the_chosen_source_and_has_a_place():
    places = [tuple(panel["gridPos"].values()) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in DASHBOARD["panels"]})
    for panel in DASHBOARD["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(one["datasource"]["uid"] == "${datasource}" for one in panel["targets"])


def test_promtool_accepts_the_configuration_and_the_alerts_of_the_docs(tmp_path):
    page = (ROOT / "docs/how-to/service-dashboard.md").read_text("utf-8")
    config = page.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "prometheus.yml").write_text(config, "utf-8")
    (tmp_path / "tickwheel-token").write_text("tw_1", "utf-8")
    shutil.copy(ROOT / "docs/how-to/alerts.yml", tmp_path)
    checked = subprocess.run(
        ["promtool", "check", "config", "prometheus.yml"], cwd=tmp_path, timeout=60, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "1 rule files found" in checked.stdout


LATE = """
rule_files: [alerts.yml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'tickwheel_lateness_seconds_bucket{{le="1"}}', values: "0x60"}}
      - {{series: 'tickwheel_lateness_seconds_bucket{{le="5"}}', values: "0+9x60"}}
      - {{series: 'tickwheel_lateness_seconds_bucket{{le="+Inf"}}', values: "0+9x60"}}
      - {{series: 'tickwheel_breaker{{service="mail", state="{state}"}}', values: "{values}"}}
      - {{series: 'tickwheel_breaker{{service="sms", state="closed"}}', values: "1x60"}}
    promql_expr_test:
      - {{expr: &firing 'count(ALERTS{{alertname="TickwheelLate", alertstate="firing"}})',
          eval_time: 20m, exp_samples: {late}}}
      - {{expr: *firing, eval_time: 40m, exp_samples: {after}}}
"""
FIRES = "[{labels: '{}', value: 1}]"


@pytest.mark.parametrize(
    ("state", "values", "late"),
    [("open", "1x20 0x40", "[]"), ("half-open", "1x20 0x40", "[]"), ("open", "0x60", FIRES)],
)
def test_lateness_pages_only_while_every_breaker_is_closed(tmp_path, state, values, late):
    shutil.copy(ROOT / "docs/how-to/alerts.yml", tmp_path)
    rules = LATE.format(state=state, values=values, late=late, after=FIRES)
    (tmp_path / "late.yml").write_text(rules, "utf-8")
    tested = subprocess.run(
        ["promtool", "test", "rules", "late.yml"], cwd=tmp_path, timeout=60, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout + tested.stderr

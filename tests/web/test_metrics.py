"""The metrics, read by Prometheus' own parser, are complete and right."""

import math
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tickwheel.durable.directory import directory

FAMILIES = {  # by name: the kind, and the labels
    "tickwheel_info": ("gauge", {"version"}),
    "tickwheel_uptime_seconds": ("gauge", set()),
    "tickwheel_submitted": ("counter", set()),
    "tickwheel_sent": ("counter", set()),
    "tickwheel_attempts_ended": ("counter", {"event"}),
    "tickwheel_lateness_seconds": ("histogram", set()),
    "tickwheel_tasks": ("gauge", {"state"}),
    "tickwheel_store_up": ("gauge", set()),
    "tickwheel_pending": ("gauge", {"state"}),
    "tickwheel_wheel_entries": ("gauge", {"level"}),
    "tickwheel_wheel_tick_seconds": ("gauge", {"level"}),
    "tickwheel_channel_latency_seconds": ("histogram", {"protocol", "service"}),
    "tickwheel_breaker": ("gauge", {"service", "state"}),
    "tickwheel_service_enabled": ("gauge", {"service"}),
    "tickwheel_service_under_way": ("gauge", {"service"}),
    "tickwheel_service_limit": ("gauge", {"service"}),
    "tickwheel_service_waiting": ("gauge", {"service"}),
    "tickwheel_calls_free": ("gauge", set()),
    "tickwheel_shards_owned": ("gauge", set()),
    "tickwheel_nodes": ("gauge", set()),
    "tickwheel_payload_bytes": ("gauge", set()),
    "tickwheel_look_seconds": ("gauge", {"kind"}),
    "tickwheel_sqlite_log_bytes": ("gauge", set()),
    "tickwheel_clock_offset_seconds": ("gauge", set()),
    "tickwheel_ready": ("gauge", set()),
    "tickwheel_stalled_seconds": ("gauge", {"reason"}),
    "tickwheel_http_requests": ("counter", {"method", "route", "status"}),
    "tickwheel_http_request_seconds": ("histogram", {"route"}),
}


def scraped(api):
    """Return all families by name, as Prometheus' parser reads them."""
    answer = api.get("/metrics", status=200)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {family.name: family for family in text_string_to_metric_families(answer.body.decode())}


def value(families, family, name=None, **labels):
    """Return the value of the only sample with these labels."""
    wanted = name or family
    found = [
        sample.value
        for sample in families[family].samples
        if sample.name in (wanted, f"{wanted}_total") and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (family, labels, families[family].samples)
    return found[0]


@pytest.fixture
def busy(either_api, receiver):
    """An application in which something of each kind has happened."""
    api = either_api
    api.service("good", endpoint=receiver.url("/ok"))
    api.service("bad", endpoint=receiver.url("/broken"), max_attempts=1, breaker={"failures": 2})
    api.service("off", enabled=False)
    for service, state, count in (("good", "finished", 3), ("bad", "failed", 2)):
        for _ in range(count):
            api.task_in(api.submit(service, delay=0)["id"], state)
    api.submit("good", delay=30)
    api.submit("good", delay=7200)
    return api


def test_every_family_has_its_kind_and_labels(busy):
    families = scraped(busy)
    assert families.keys() == FAMILIES.keys()
    for name, (kind, labels) in FAMILIES.items():
        family = families[name]
        assert (name, family.type) == (name, kind)
        assert len(family.documentation) > 5
        assert family.samples, name
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == labels, name


def test_the_values_are_right(busy):
    families = scraped(busy)
    assert value(families, "tickwheel_submitted") == 7
    assert value(families, "tickwheel_sent") == 5
    assert value(families, "tickwheel_attempts_ended", event="finish") == 3
    assert value(families, "tickwheel_attempts_ended", event="fail") == 2
    assert value(families, "tickwheel_tasks", state="live") == 2
    assert value(families, "tickwheel_tasks", state="final") == 5
    assert value(families, "tickwheel_pending", state="wheel") == 1
    assert value(families, "tickwheel_pending", state="running") == 0
    assert sum(sample.value for sample in families["tickwheel_wheel_entries"].samples) == 1
    assert value(families, "tickwheel_breaker", service="good", state="closed") == 1
    assert value(families, "tickwheel_breaker", service="bad", state="open") == 1
    assert value(families, "tickwheel_breaker", service="bad", state="closed") == 0
    assert value(families, "tickwheel_service_enabled", service="off") == 0
    latency = "tickwheel_channel_latency_seconds"
    assert value(families, latency, f"{latency}_count", service="good", protocol="http") == 3
    assert value(families, latency, f"{latency}_count", service="bad", protocol="http") == 2
    lateness = "tickwheel_lateness_seconds"
    assert value(families, lateness, f"{lateness}_count") == 5
    assert value(families, "tickwheel_nodes") == 1
    requests = "tickwheel_http_requests"
    assert value(families, requests, method="POST", route="/v1/tasks", status="201") == 7
    assert value(families, requests, method="PUT", route="/v1/services/{name}", status="201") == 3


def test_histograms_rise_to_their_count(busy):
    for family in scraped(busy).values():
        if family.type != "histogram":
            continue
        series = {}
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
            found = series.setdefault(labels, {"buckets": []})
            if sample.name.endswith("_bucket"):
                found["buckets"].append((float(sample.labels["le"]), sample.value))
            else:
                found[sample.name.rpartition("_")[2]] = sample.value
        for found in series.values():
            bounds = [bound for bound, _ in found["buckets"]]
            counts = [count for _, count in found["buckets"]]
            assert bounds == sorted(bounds)
            assert bounds[-1] == math.inf
            assert counts == sorted(counts)
            assert counts[-1] == found["count"]
            assert found["sum"] >= 0


def test_no_series_is_repeated_and_names_are_valid(busy):
    text = busy.get("/metrics").body.decode()
    series = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series))
    assert all(re.fullmatch(r"tickwheel_[a-z_]+(\{[^\n]*\})?", one) for one in series)
    heads = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))


def test_counters_never_decrease(busy):
    def counters():
        return {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in scraped(busy).values()
            if family.type == "counter"
            for sample in family.samples
        }

    before = counters()
    busy.task_in(busy.submit("good", delay=0)["id"], "finished")
    after = counters()
    assert all(after[name] >= count for name, count in before.items())
    assert after != before


def test_unknown_paths_make_no_new_series(api, monkeypatch):
    monkeypatch.setattr(directory, "MIN_RELOAD_SECONDS", 0.0)  # read unknown names each time

    def series():
        text = api.get("/metrics").body.decode()
        return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}

    def nonsense(number):
        api.get(f"/nowhere/{number}")
        api.get(f"/v1/tasks/{number:032x}")
        api.get(f"/v1/services/s{number}")
        api.request(f"ODD{number}", "/v1/tasks")
        api.post("/v1/tasks", {"service": f"s{number}"})

    nonsense(0)
    series()
    before = series()
    for number in range(1, 50):
        nonsense(number)
    assert series() == before


def test_a_service_that_is_deleted_leaves_the_metrics(api, receiver):
    api.service("mail", endpoint=receiver.url("/ok"))
    api.task_in(api.submit(delay=0)["id"], "finished")
    assert b'service="mail"' in api.get("/metrics").body
    api.delete("/v1/services/mail", status=204)
    assert b'service="mail"' not in api.get("/metrics").body


def test_a_running_call_is_counted(api, receiver):
    api.service("mail", endpoint=receiver.url("/slow"), concurrency=1)
    first, second = (api.submit(delay=0)["id"] for _ in range(2))
    api.until(lambda: receiver.held == 1)
    families = scraped(api)
    assert value(families, "tickwheel_pending", state="running") == 1
    assert value(families, "tickwheel_service_under_way", service="mail") == 1
    assert value(families, "tickwheel_service_limit", service="mail") == 1
    receiver.release()
    for task_id in (first, second):
        api.task_in(task_id, "finished")
    assert value(scraped(api), "tickwheel_service_under_way", service="mail") == 0


@pytest.mark.parametrize("path", ["/v1/stats", "/v1/wheel", "/v1/stats?scope=cluster", "/metrics"])
def test_one_namespace_sees_nothing_change_when_another_submits(api, path):
    def seen(namespace):
        answer = api.get(path, headers={"tickwheel-namespace": namespace}, status=200)
        text = re.sub(
            r'uptime[^,\n]*|"seconds[^,]*|tickwheel_look_seconds.*', "", answer.body.decode()
        )
        return re.sub(r"tickwheel_(clock_offset|sqlite_log).*", "", text)

    for namespace in ("shop", "other"):
        api.put("/v1/services/mail", {"endpoint": "http://127.0.0.1:9/"}, status=201,
                headers={"tickwheel-namespace": namespace})  # fmt: skip
    before = seen("shop")
    body = {"service": "mail", "delay": 30}
    api.post("/v1/tasks", body, headers={"tickwheel-namespace": "other"}, status=201)
    api.until(lambda: api.node.horizon.entries)
    assert seen("shop") == before
    assert ("mail" in before) == (path != "/v1/wheel")

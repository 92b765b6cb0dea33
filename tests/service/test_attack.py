"""Hostile traffic of all kinds for some seconds; `make attack` takes ten minutes and checks p99."""

from service.attack import run_and_report

SECONDS = 8


def test_under_hostile_traffic_memory_is_bounded_and_healthy_traffic_goes_on(tmp_path):
    report = run_and_report(f"sqlite:///{tmp_path}/tasks.db", tmp_path, SECONDS)
    print(report)
    assert report.faults() == []
    assert all(counts["acts"] for counts in report.kinds.values())
    assert sum(counts.get("4xx", 0) for counts in report.kinds.values()) > 0

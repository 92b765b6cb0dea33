"""Writes build/last-run.json at the end of a run of pytest in which every collected test ended.

It has the number of tests and the names of those that failed, which `tools/test-again` runs again.
A run whose worker crashed or hung, or that was interrupted, leaves no record.
"""

import json

import pytest


def register(config):
    """Record this run; the workers of xdist send their reports to the process that records it."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(RunRecord(config.rootpath / "build" / "last-run.json"))


class RunRecord:
    def __init__(self, path):
        self._path = path
        self._collected = set()
        self._ended = set()
        self._failed = set()
        self._collection_failed = False
        path.unlink(missing_ok=True)  # an earlier run proves nothing about this one

    def pytest_collectreport(self, report):
        self._collection_failed |= report.failed

    def pytest_collection_finish(self, session):
        self._collected.update(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        self._collected.update(ids)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._failed.add(report.nodeid)
        if report.when == "teardown":  # the report of a crash has no phase
            self._ended.add(report.nodeid)

    def pytest_sessionfinish(self, session):
        if self._ended != self._collected or self._collection_failed:
            return
        self._path.parent.mkdir(exist_ok=True)
        record = {"tests": len(self._ended), "failed": sorted(self._failed)}
        self._path.write_text(json.dumps(record), "utf-8")

"""The soak of all layers at once; `make soak` takes half an hour, and fails on growth.

TICKWHEEL_SOAK_SECONDS changes its duration; samples, plot and logs are in build/soak.
"""

import json
import os
import re
import signal

import pytest

from servers import wait_until
from soak.run import ROOT, Soak, describe, run_alone, soak

LONG_SECONDS = float(os.environ.get("TICKWHEEL_SOAK_SECONDS", "1800"))


def test_under_mixed_load_on_all_layers_nothing_is_lost_early_or_done_twice(
    tmp_path, postgres_server, postgres_url, redis_url, redis_server
):
    found = soak(tmp_path, 0, postgres_server, postgres_url, redis_server)
    text, faults = describe(found)
    assert faults == [], text
    sampled = {(source, measure) for source, measure, _ in found["series"]}
    for source in ("library", "embedded", "traffic", "node1", "node2"):
        assert {(source, one) for one in ("memory", "descriptors", "threads")} <= sampled
    assert {("postgres", "bytes"), ("sqlite", "bytes"), ("table task", "rows")} <= sampled
    assert {(one, "p99") for one in ("library", "embedded", "traffic")} <= sampled
    assert all(value > 0 for _, measure, points in found["series"] for _, value in points
               if measure in ("memory", "descriptors", "threads", "bytes"))  # fmt: skip


def test_a_program_that_dies_is_reported_and_what_was_sampled_is_kept(
    tmp_path, postgres_server, postgres_url, redis_url, redis_server, monkeypatch
):
    run = Soak.run

    def kill_and_run(self, *args):
        for one in self.programs.values():
            wait_until(lambda one=one: one.line["counts"], f"{one.name} reports")
            os.kill(one.pid, signal.SIGKILL)
            wait_until(lambda one=one: "ended" in one.line, f"{one.name} has ended")
        run(self, *args)

    monkeypatch.setattr(Soak, "run", kill_and_run)
    found = soak(tmp_path, 0, postgres_server, postgres_url, redis_server)
    assert json.loads((tmp_path / "soak.json").read_text())["faults"] == found["faults"]
    _, faults = describe(found)
    for name in ("library", "embedded", "traffic"):
        said = [text for text in faults if text.startswith(f"{name}: ")]
        assert re.fullmatch(rf"{name}: it ended after \d+ s, before the run did", said[0])
        assert said[1].startswith(f"{name}: -9: ")
    assert {"postgres", "node1", "node2"} <= {source for source, *_ in found["series"]}


@pytest.mark.soak
def test_half_an_hour_of_mixed_load_leaves_memory_descriptors_and_threads_flat(capsys):
    text, faults = run_alone(ROOT / "build" / "soak", LONG_SECONDS)
    with capsys.disabled():
        print(f"\n{text}")
    assert faults == []

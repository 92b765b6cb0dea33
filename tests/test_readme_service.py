"""The shell lines of the README and of two how-to pages run unchanged against a server."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "docs/how-to/service-curl.md", "docs/how-to/migrate.md"]
TEXT = "".join((ROOT / page).read_text("utf-8") for page in PAGES)
LINES = "\n".join(re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
SECONDS = 60


@pytest.fixture
def start():
    """Start programs, and stop them with SIGINT at the end."""
    started = []

    def run(*words, **options):
        process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, text=True, cwd=ROOT, **options
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_shell_lines_work(start, tmp_path):
    command = re.search(r"tickwheel (serve .*)", (ROOT / "Makefile").read_text("utf-8"))[1]
    assert "--allow-private-targets" in command
    store = f"sqlite:///{tmp_path}/tasks.db"
    words = ["--store", store, "--listen", "127.0.0.1:0", "--allow-private-targets"]
    server = start("-m", "tickwheel", "serve", *words)
    address = server.stdout.readline().split()[-1]
    port = free_port()
    receiver = start("examples/http_receiver.py", str(port))
    assert receiver.stdout.readline()

    script = LINES.replace("http://127.0.0.1:7380/", address).replace(":8000/", f":{port}/")
    assert script.count(address) == len(PAGES)
    assert script.count(f":{port}/") == 2
    # Silence curl's progress, and wait for the calls instead of sleeping.
    script = script.replace("curl ", "curl -sS ")
    look = 'curl -sS "$tick/tasks?key=o-1"'
    assert script.count(look) == 1
    called = f"until {look} | grep -q finished; do sleep 0.05; done"
    script = script.replace(look, f"{called}; {look}")
    assert script.count("sleep 1 ") == 1
    begun = "until curl -sS $tick/tasks/$task | grep -q running; do sleep 0.05; done"
    script = script.replace("sleep 1 ", f"{begun} ")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        check=False, capture_output=True, text=True, timeout=SECONDS,
        env={**os.environ, "NO_PROXY": "*"}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [one for one in answers if "problem" in one.get("type", "")]
    put, first, page, moved, cancelled, replayed, batch, slow, fed, last, expiry, removed = answers
    assert (put["name"], slow["name"]) == ("orders", "slow")
    assert first["state"] == "delay"
    assert [(one["id"], one["state"]) for one in page["items"]] == [(first["id"], "finished")]
    assert moved == {"won": True, "state": "delay"}
    assert cancelled == {"won": True, "state": "cancelled"}
    assert replayed["replay_of"]
    assert [one["status"] for one in batch["items"]] == [201, 201]
    assert fed == {"won": True, "state": "finished"}
    assert (last["state"], last["result"]) == ("finished", "done")
    assert (expiry["key"], removed["cancelled"]) == ("order:o-1", 1)
    assert "o-1" in receiver.stdout.readline()

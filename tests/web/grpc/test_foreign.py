"""Foreign clients of the gRPC API: stock generated code elsewhere, and grpcurl by reflection.

They are downloaded, which needs a network: `make test-foreign` runs them.
"""

import json
import os
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

from callees import Callee, accepting
from web.grpc.test_server import serve_grpc  # noqa: F401 - a fixture

pytestmark = pytest.mark.foreign
WATCHDOG = 600.0
SOURCE = Path(__file__).parents[3] / "src"
GRPCURL = "github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.4"
SERVICE = "tickwheel.v1.TaskService"


@pytest.fixture
def server(serve_grpc):  # noqa: F811
    """A server, and a callee that accepts each task and leaves its end to feedback."""
    server = serve_grpc()
    with Callee() as callee:
        callee.behave = accepting
        server.service("later", callee.endpoint, protocol="grpc")
        yield server


def test_a_client_generated_by_stock_tools_in_another_environment(server, tmp_path):
    there = tmp_path / "there"
    venv.create(there, with_pip=True)
    python = there / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "grpcio-tools"], check=True)
    proto, made = tmp_path / "proto", tmp_path / "made"
    for name in ("tasks", "callback"):
        target = proto / "tickwheel" / "v1" / f"{name}.proto"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SOURCE / "tickwheel" / "v1" / target.name, target)
    made.mkdir()
    flags = [f"--{kind}_out={made}" for kind in ("python", "grpc_python")]
    files = sorted(proto.rglob("*.proto"))
    command = [python, "-m", "grpc_tools.protoc", f"-I{proto}", *flags, *files]
    subprocess.run(command, check=True, cwd=tmp_path)
    client = Path(__file__).with_name("foreign_client.py")
    ran = subprocess.run(
        [python, "-I", client, made, server.grpc], capture_output=True, text=True, check=False
    )
    assert (ran.stdout.split(), ran.stderr) == (["True", "7", "True"], "")


def test_grpcurl_submits_cancels_watches_and_feeds_back_by_reflection(server, tmp_path):
    environment = {**os.environ, "GOBIN": str(tmp_path)}
    subprocess.run(["go", "install", GRPCURL], check=True, env=environment)

    def call(method, **request):
        command = [tmp_path / "grpcurl", "-plaintext", "-d", json.dumps(request), server.grpc]
        return subprocess.run(
            [*command, f"{SERVICE}/{method}"], capture_output=True, text=True, check=True
        ).stdout

    task = json.loads(call("Submit", service="later", payload='{"id": 1}'))["task"]
    watching = subprocess.Popen(
        [tmp_path / "grpcurl", "-plaintext", "-d", json.dumps({"id": task["id"]}), server.grpc,
         f"{SERVICE}/Watch"], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with watching:
        for line in watching.stdout:
            if "STATE_RUNNING" in line:
                break
        call("Feedback", id=task["id"], attempt=1, outcome="OUTCOME_FINISHED", result="7")
        assert "STATE_FINISHED" in watching.stdout.read()
    later = json.loads(call("Submit", service="later", delay="3600s"))["task"]
    verdict = json.loads(call("Cancel", id=later["id"]))
    assert verdict == {"won": True, "state": "STATE_CANCELLED"}

"""Java Dubbo over Triple, as a client of the gRPC API and as a callee; built from the .proto files.

Maven downloads it, which needs a network: `make test-foreign` runs this.
"""

import socket
import subprocess
from pathlib import Path

import pytest

from callees import Callee, accepting
from tickwheel.values.signature import new_secret
from web.grpc.test_server import serve_grpc  # noqa: F401 - a fixture
from web.serving import create_token, wait_until

pytestmark = pytest.mark.foreign
WATCHDOG = 600.0
PROJECT = Path(__file__).with_name("dubbo")
PROTO = Path(__file__).parents[3] / "src"
# Dubbo replaces a loopback address by that of the first network interface.
ON_LOOPBACK = "-Ddubbo.network.interface.preferred=lo", "-Ddubbo.network.interface.ignored=eth.*"
UTF_8 = "-Dstdout.encoding=UTF-8", "-Dfile.encoding=UTF-8"
QUIET = "-Ddubbo.application.logger=slf4j", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"


@pytest.fixture(scope="module")
def java(tmp_path_factory):
    """Return the command that runs a class of the project; it is built outside the tree."""
    output = tmp_path_factory.mktemp("dubbo")
    subprocess.run(
        ["mvn", "--quiet", "--batch-mode", "--no-transfer-progress", "--file", PROJECT / "pom.xml",
         f"-Dproto={PROTO}", f"-Doutput={output}", "compile", "dependency:copy-dependencies",
         "-DincludeScope=runtime", f"-DoutputDirectory={output}/lib"],
        check=True,
    )  # fmt: skip
    assert not (PROJECT / "target").exists()
    return ["java", *ON_LOOPBACK, *UTF_8, *QUIET, "-cp", f"{output}/classes:{output}/lib/*"]


def test_a_dubbo_client_submits_watches_feeds_back_and_cancels(serve_grpc, java, sqlite_url):  # noqa: F811
    token = create_token(sqlite_url, "submit", "read", "admin")
    server = serve_grpc()
    server.token = token
    with Callee() as callee:
        callee.behave = accepting
        server.service("later", callee.endpoint, protocol="grpc")
        ran = subprocess.run(
            [*java, "Client", server.grpc, token], capture_output=True, text=True, check=False
        )
    assert (ran.stdout.splitlines(), ran.returncode) == (
        [
            "repeated true true",
            "feedback true",
            "watch STATE_FINISHED",
            "get 7",
            "cancel STATE_CANCELLED",
            "error NOT_FOUND: no service is named 'none'",
        ],
        0,
    ), ran.stderr


def test_a_dubbo_callee_is_called_again_and_can_verify_the_signature(serve_grpc, java):  # noqa: F811
    server = serve_grpc()
    secret = new_secret()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*java, "Callee", str(port), secret]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as callee:
        try:
            assert callee.stdout.readline() == "ready\n"
            endpoint = f"grpc://127.0.0.1:{port}"
            server.service("orders", endpoint, protocol="grpc", secret=secret)
            task = server.post("/v1/tasks", '{"service": "orders", "payload": {"ö":1}}'.encode())
            path = f"/v1/tasks/{task.json['id']}"
            wait_until(lambda: server.get(path).json["state"] == "finished", "the task ends")
        finally:
            callee.kill()
        assert server.get(path).json["result"] == {"by": "dubbo"}
        first, second = server.get(f"{path}/attempts").json["items"]
        assert "answered FAILED_PRECONDITION" in first["error"]
        assert "not yet" in first["error"]
        assert second["error"] is None
        assert callee.stdout.read().splitlines() == ['1 true {"ö":1}', '2 true {"ö":1}']

"""The gRPC protocol: the code in the package is what grpcio-tools makes of the files there."""

import tomllib
from importlib.metadata import version

from test_openapi_file import ROOT, tool

FOLDER = ROOT / "src" / "tickwheel" / "v1"


def test_the_generated_code_is_what_the_tool_makes(tmp_path):
    tool("grpc-stubs").write_stubs(tmp_path)
    made = {path.name: path.read_text("utf-8") for path in (tmp_path / "tickwheel/v1").iterdir()}
    assert len(made) == 6
    kept = {path.name: path.read_text("utf-8") for path in FOLDER.glob("*_pb2*.py*")}
    assert kept == made, "run tools/grpc-stubs"


def test_the_lowest_versions_of_the_extra_can_load_the_generated_code():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extra = " ".join(project["optional-dependencies"]["grpc"])
    generator = version("grpcio-tools")
    assert f"grpcio>={generator}," in extra
    assert f"GRPC_GENERATED_VERSION = '{generator}'" in (FOLDER / "tasks_pb2_grpc.py").read_text()
    assert "# Protobuf Python Version: 7.35.0" in (FOLDER / "tasks_pb2.py").read_text()
    assert "protobuf>=7.35.1,<8" in extra

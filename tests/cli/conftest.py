"""The command line in this process: `run(...)` returns exit code, stdout and stderr."""

import json
from typing import NamedTuple

import pytest
from click.testing import CliRunner

import tickwheel.client
from cli.fakes import FakeClient
from tickwheel.cli.root import root


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def lines(self):
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture(autouse=True)
def _clear_environment(monkeypatch, tmp_path):
    for name in ("SERVER", "TOKEN", "NAMESPACE", "STORE", "CONFIG"):
        monkeypatch.delenv(f"TICKWHEEL_{name}", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)  # the shell may have set it
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run():
    def run(*words, stdin=None):
        result = CliRunner().invoke(root, [str(word) for word in words], input=stdin)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def client(monkeypatch):
    fake = FakeClient()
    monkeypatch.setattr(tickwheel.client, "Client", fake)
    return fake

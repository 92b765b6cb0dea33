"""The reference of the API and the commands is up to date: its tools are run again."""

import importlib.machinery
import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def tool(name):
    """Return a tool as a module; it has no suffix, as it is a command."""
    path = str(ROOT / "tools" / name)
    loader = importlib.machinery.SourceFileLoader(name.replace("-", "_"), path)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["openapi", "http-reference", "cli-reference", "grpc-reference"])
def test_the_file_is_what_its_tool_writes(name):
    made = tool(name)
    assert made.FILE.read_text("utf-8") == made.text(), f"run tools/{name}"


def test_only_commands_with_a_config_take_settings_and_the_others_show_their_options():
    parts = tool("cli-reference").text().split("\n### `tickwheel ")
    commands = {part.partition("`")[0]: part for part in parts}
    assert "`--allow-target`; and `--config`." in commands["dashboard"]
    assert "| `--store URL` | Look into this store" in commands["top"]
    assert "| `--listen TEXT` | HOST:PORT" in commands["lab"]
    assert "--config" not in commands["top"] + commands["lab"]


def test_a_command_shows_the_options_that_only_it_has_though_a_variable_may_set_them():
    page = tool("cli-reference").text()
    [row] = re.findall(r"^\| `--broker URL` .*$", page, re.MULTILINE)
    assert "TICKWHEEL_BROKER" in row
    assert "required" in row
    assert "| `--server" not in page
    assert "| `--token" not in page


def test_the_page_has_every_operation_and_every_type_of_an_answer():
    made = tool("http-reference")
    page, document = made.text(), json.loads(made.SOURCE.read_text("utf-8"))
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"### {method.upper()} `{path}`" in page
    for name in ("Task", "Problem", "Service", "Batch"):
        assert f"\n### {name}\n" in page


def test_what_the_page_says_of_fields_is_said_of_fields_that_exist():
    made = tool("http-reference")
    document = json.loads(made.SOURCE.read_text("utf-8"))
    for name, fields in made.MEANINGS.items():
        assert set(fields) <= set(document["components"]["schemas"][name]["properties"]), name
    for method, path in made.NOTES:
        assert method in document["paths"][path]


def test_the_page_has_the_defaults_and_the_meanings_of_parameters():
    page = tool("http-reference").text()
    assert "| `limit` | `100` | a whole number from 1 to 1,000 | items of a page, at most |" in page
    assert "| `limit` | `10` | a whole number from 1 to 100 | the number of firings" in page
    assert "| `span` | `hour` | `day`, `hour`, `minute`, `week` | how far to look ahead |" in page


def test_the_meanings_of_parameters_are_of_parameters_that_exist():
    made = tool("http-reference")
    document = json.loads(made.SOURCE.read_text("utf-8"))
    names = {
        path: {one["name"] for each in operations.values() for one in each.get("parameters", ())}
        for path, operations in document["paths"].items()
    }
    assert made.PARAMETERS.keys() <= set().union(*names.values())
    for path, meanings in made.OF_PATH.items():
        assert meanings.keys() <= names[path]

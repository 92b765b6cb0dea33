"""Every operation, type, command and metric that an earlier version published still exists.

published.toml lists them. `test_package.py` compares the exported names of the packages;
`test_openapi_file.py` and `test_service_docs.py` compare the pages that are read here with the
code.
"""

import json
import re
import tomllib
from pathlib import Path

import click

from tickwheel.cli.root import root

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
PUBLISHED = tomllib.loads((HERE / "published.toml").read_text("utf-8"))
OPENAPI = json.loads((DOCS / "reference" / "openapi.json").read_text("utf-8"))


def missing(kind, parts_of):
    """Return what the list of a kind has, and `parts_of(name)` has not, by name."""
    listed = PUBLISHED[kind]
    assert listed
    lost = {name: {*parts.split()} - {*parts_of(name)} for name, parts in listed.items()}
    return {name: parts for name, parts in lost.items() if parts}


def parameters_of(operation):
    method, _, path = operation.partition(" ")
    return [one["name"] for one in OPENAPI["paths"][path][method.lower()].get("parameters", [])]


def fields_of(name):
    return OPENAPI["components"]["schemas"][name].get("properties", {})


def options_of(name):
    """Return the options of a command, given its words."""
    command = root
    context = click.Context(root)
    for word in name.split():
        command = command.get_command(context, word)
        assert command is not None, f"there is no command {name!r}"
    options = [one for one in command.params if isinstance(one, click.Option)]
    return [text for one in options for text in (*one.opts, *one.secondary_opts)]


def test_every_operation_has_its_parameters():
    assert missing("operations", parameters_of) == {}


def test_every_type_has_its_fields():
    assert missing("types", fields_of) == {}


def test_every_command_has_its_options():
    assert missing("commands", options_of) == {}


def test_every_metric_has_its_name():
    page = (DOCS / "how-to" / "service-operate.md").read_text("utf-8")
    shown = re.findall(r"^\| `(tickwheel_\w+)", page, re.MULTILINE)
    assert missing("metrics", lambda _: shown) == {}

"""Every operation, command, metric, code, setting and message once published still exists.

published.toml lists them. `test_package.py` compares the exported names of the packages;
`test_openapi_file.py` and `test_service_docs.py` compare the pages that are read here with the
code.
"""

import json
import pkgutil
import re
import tomllib
from pathlib import Path

import click
from google.protobuf import descriptor_pool

from tickwheel.cli import exit_codes
from tickwheel.cli.root import root
from tickwheel.config import SETTINGS
from tickwheel.v1 import callback_pb2, tasks_pb2  # noqa: F401 - they fill the pool

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs"
PUBLISHED = tomllib.loads((HERE / "published.toml").read_text("utf-8"))
OPENAPI = json.loads((DOCS / "reference" / "openapi.json").read_text("utf-8"))


def table(page, row):
    """Return what a pattern finds in the lines of a page of the reference."""
    return re.findall(row, (DOCS / "reference" / page).read_text("utf-8"), re.MULTILINE)


NUMBERS = dict(table("errors.md", r"^\| `(\w+)` \|((?: \d+ \|)+)"))
POOL = descriptor_pool.Default()


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


def test_every_error_code_has_its_status_and_its_exit_code():
    assert missing("codes", lambda code: re.findall(r"\d+", NUMBERS[code])) == {}


def test_every_error_has_its_code():
    assert missing("errors", lambda name: [pkgutil.resolve_name(f"tickwheel.{name}").code]) == {}


def test_every_exit_code_has_its_number():
    numbers = [str(value) for value in vars(exit_codes).values() if isinstance(value, int)]
    assert missing("exit_codes", lambda _: numbers) == {}


def test_every_setting_has_its_name():
    names = {
        "names": [setting.name for setting in SETTINGS],
        "variables": table("environment.md", r"^\| `(TICKWHEEL_[A-Z_]+)"),
    }
    assert missing("settings", names.get) == {}


def numbered(parts):
    return [f"{one.name}={one.number}" for one in parts]


def fields_of_message(name):
    return numbered(POOL.FindMessageTypeByName(f"tickwheel.v1.{name}").fields)


def values_of_enum(name):
    return numbered(POOL.FindEnumTypeByName(f"tickwheel.v1.{name}").values)


def methods_of(name):
    return [one.name for one in POOL.FindServiceByName(f"tickwheel.v1.{name}").methods]


def test_every_grpc_message_has_its_fields_with_their_numbers():
    assert missing("messages", fields_of_message) == {}


def test_every_grpc_enum_has_its_values_with_their_numbers():
    assert missing("enums", values_of_enum) == {}


def test_every_grpc_service_has_its_methods():
    assert missing("rpcs", methods_of) == {}

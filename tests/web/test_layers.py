"""The HTTP API acts through the verbs of `Scheduler` only, as programs that embed it do."""

import ast
from pathlib import Path

import pytest

import tickwheel.web

FOLDER = Path(tickwheel.web.__file__).parent
MODULES = sorted(FOLDER.rglob("*.py"))
# The API, its contracts, and values to check or to show; no step and no store.
IMPORTED = {
    "tickwheel.durable.scheduler",
    "tickwheel.durable.verbs.submission",
    "tickwheel.durable.verbs.tasks",  # watch_task
    "tickwheel.durable.channel",
    "tickwheel.durable.coordinator",
    "tickwheel.durable.registry",
    "tickwheel.durable.histogram",
    "tickwheel.durable.exposition",
    "tickwheel.durable.time_slices",
    "tickwheel.durable.directory.configuration",
    "tickwheel.durable.directory.directory",
    "tickwheel.durable.directory.tokens",
    "tickwheel.durable.permits.descriptors",
    "tickwheel.durable.permits.flow",  # the states of a breaker
    "tickwheel.durable.steps.health",  # the reasons of a stall
}


def imported_by(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_module_imports_the_internals_behind_the_verbs():
    modules = {
        str(file.relative_to(FOLDER.parent.parent).with_suffix("")).replace("/", ".")
        for file in (FOLDER.parent / "durable").rglob("*.py")
    }
    for path in MODULES:
        assert modules & set(imported_by(path)) <= IMPORTED, path.name


@pytest.mark.parametrize("name", ["tasks", "services"])
def test_no_handler_uses_the_node_or_the_store_directly(name):
    tree = ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not {"node", "store", "_node", "_running_node"} & attributes

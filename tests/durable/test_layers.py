"""Imports point inward: edges, scheduler, steps, task and contracts, library."""

import ast
from pathlib import Path

import pytest

import tickwheel.durable

FOLDER = Path(tickwheel.durable.__file__).parent

# From the inside out; a module may import what stands in a line before its own.
LAYERS = [
    "changes encoding cron outcome service gate background progress log histogram tokens share",
    "restoring flow vault descriptors payloads",
    "serial",
    "task",
    "schedule channel coordinator registry batch",
    "store function aside configuration ending",
    "steps loader recurring submit prune leases feedback directory holds",
    "dispatch administration expiry health",
    "node verbs",
    "blocking",
    "scheduler",
    "__init__",
]
RANK = {module: rank for rank, line in enumerate(LAYERS) for module in line.split()}
# Implementations know their contract, what it speaks of, and each other's parts in their folder.
IMPLEMENTATIONS = {
    "stores": {"task", "schedule", "store", "service", "registry", "log"},
    "channels": {"task", "serial", "channel", "gate", "outcome", "service", "histogram"}
    | {"encoding", "log"},
    "coordinators": {"coordinator", "log"},
    "buffers": {"serial", "background"},
}


ALSO = {"buffers": "stores"}  # the same connections


def imported_by(path):
    for node in runtime_nodes(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("tickwheel.durable"):
            module = node.module.removeprefix("tickwheel.durable").lstrip(".")
            yield from [module] if module else [alias.name for alias in node.names]


def runtime_nodes(node):
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from runtime_nodes(child)


def test_every_module_has_its_layer():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(RANK)
    folders = {path.name for path in FOLDER.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(IMPLEMENTATIONS)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_module_imports_what_is_further_in(path):
    for module in imported_by(path):
        folder = module.partition(".")[0]
        if folder in IMPLEMENTATIONS:
            assert path.stem in ("scheduler", "__init__"), f"{path.stem} names {module}"
        else:
            assert RANK[module] < RANK[path.stem], f"{path.stem} imports {module}"


@pytest.mark.parametrize(
    "path",
    sorted(path for folder in IMPLEMENTATIONS for path in (FOLDER / folder).glob("*.py")),
    ids=lambda path: f"{path.parent.name}.{path.stem}",
)
def test_an_implementation_imports_its_contract_and_its_own_folder(path):
    for module in imported_by(path):
        folder, _, inside = module.partition(".")
        own = folder in (path.parent.name, ALSO.get(path.parent.name)) or (
            not inside and (path.parent / f"{folder}.py").exists()
        )
        assert own or module in IMPLEMENTATIONS[path.parent.name], f"{path} imports {module}"


def test_only_the_stores_and_buffers_need_packages_from_elsewhere():
    for path in FOLDER.glob("*.py"):
        for node in runtime_nodes(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {"asyncpg", "apsw", "redis"}


EDGES = {"web", "client", "cli", "receiver", "config"}


@pytest.mark.parametrize(
    "path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER))
)
def test_the_edges_are_unknown_here_and_only_the_channel_speaks_http(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        modules = [node.module] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            package, _, rest = (module or "").partition(".")
            neighbour = rest.partition(".")[0] if package == "tickwheel" else ""
            assert neighbour not in EDGES, f"imports {module}"
            assert neighbour != "http" or path.parent.name == "channels", f"imports {module}"


def test_what_is_pure_asks_no_clock_and_no_loop():
    for name in ("flow", "configuration", "registry", "service", "channel", "task", "ending"):
        tree = ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))
        imported = {
            name.partition(".")[0]
            for node in runtime_nodes(tree)
            for name in (
                [alias.name for alias in node.names] if isinstance(node, ast.Import)
                else [node.module] if isinstance(node, ast.ImportFrom) else []
            )
        }  # fmt: skip
        assert not imported & {"asyncio", "time", "threading"}, name

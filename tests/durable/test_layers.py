"""Imports point inward: values, contracts, parts, steps, the API; implementations stand aside."""

import ast
from pathlib import Path

import tickwheel

ROOT = Path(tickwheel.__file__).parent
DURABLE = ROOT / "durable"

# From the inside out: a module imports only from layers before its own, and from its own folder.
LAYERS = [
    "histogram log time_slices",
    "store registry channel coordinator",
    "schedules",
    "permits batching",
    "directory",
    "steps",
    "background function buffers exposition tracing",
    "administration",
    "verbs",
    "blocking",
    "implementations",
    "scheduler",
    "__init__",
]
RANK = {name: rank for rank, line in enumerate(LAYERS) for name in line.split()}
# An implementation imports its contract, the layers below it, and its own folder.
IMPLEMENTATIONS = {"stores", "channels", "coordinators"}
INNERMOST = {"histogram", "log", "time_slices", "permits", "batching"}
INNERMOST |= {"store", "schedules", "registry", "channel", "coordinator"}
NAMES_IMPLEMENTATIONS = {"implementations", "__init__"}
DRIVERS = {"aiokafka", "aiormq", "asyncpg", "apsw", "nats", "redis", "psycopg", "sqlalchemy"}
EDGES = {"web", "client", "cli", "receiver", "config"}
MODULES = sorted(DURABLE.rglob("*.py"))


def runtime_nodes(node):
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from runtime_nodes(child)


def imported_by(path, *, runtime=True):
    """Give the full names of the modules that a file imports."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in runtime_nodes(tree) if runtime else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [name for name in inner if is_module(name)]
            yield from modules or [node.module]


def is_module(name):
    path = ROOT.parent.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def place_of(path):
    """Return the folder of a module in durable, or its own name at the root."""
    parts = path.relative_to(DURABLE).parts
    return parts[0].removesuffix(".py")


def neighbours(path):
    """Give the folder or module of durable that each import names."""
    for module in imported_by(path):
        if module.startswith("tickwheel.durable."):
            yield module.split(".")[2]


def identify(path):
    return str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")


def test_every_module_has_its_layer():
    assert {place_of(path) for path in MODULES} == {*RANK, *IMPLEMENTATIONS}


def is_further_in(neighbour, place):
    """Return whether a folder or module of durable may be imported at a place."""
    if place in IMPLEMENTATIONS:
        return neighbour in INNERMOST | {place}
    if neighbour in IMPLEMENTATIONS:
        return place in NAMES_IMPLEMENTATIONS
    return neighbour == place or RANK[neighbour] < RANK[place]


def test_a_module_imports_what_is_further_in():
    wrong = [
        f"{identify(path)} imports {neighbour}"
        for path in MODULES
        for neighbour in neighbours(path)
        if not is_further_in(neighbour, place_of(path))
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_circle():
    imports = {
        f"tickwheel.{identify(path)}": {*imported_by(path)}
        for path in [*MODULES, *(ROOT / "values").rglob("*.py")]
        if path.stem != "__init__"
    }
    while leaves := {name for name, needs in imports.items() if not needs & imports.keys()}:
        imports = {name: needs for name, needs in imports.items() if name not in leaves}
    assert not imports, sorted(imports)


def test_values_import_errors_and_arguments_only():
    allowed = {"errors", "arguments", "values"}
    paths = [*(ROOT / "values").rglob("*.py")]
    assert paths
    for path in paths:
        ours = [name for name in imported_by(path) if name.partition(".")[0] == "tickwheel"]
        assert {name.split(".")[1] for name in ours} <= allowed, path


def test_only_implementations_need_drivers_and_no_module_knows_the_edges():
    for path in MODULES:
        for module in imported_by(path, runtime=False):
            package, _, rest = module.partition(".")
            neighbour = rest.partition(".")[0] if package == "tickwheel" else ""
            found = f"{path} imports {module}"
            assert package not in DRIVERS or place_of(path) in IMPLEMENTATIONS, found
            assert neighbour not in EDGES, found
            assert neighbour != "http" or place_of(path) == "channels", found


PURE = ["values/**/*", "permits/flow", "permits/share", "permits/payloads", "permits/semaphore"]
PURE += ["directory/configuration", "directory/tokens", "registry", "channel", "steps/ending"]


def test_pure_modules_need_no_clock_no_loop_and_no_thread():
    for pattern in PURE:
        found = sorted((ROOT if pattern.startswith("values") else DURABLE).glob(f"{pattern}.py"))
        assert found, pattern
        for path in found:
            packages = {name.partition(".")[0] for name in imported_by(path)}
            assert not packages & {"asyncio", "time", "threading"}, path

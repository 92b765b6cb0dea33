"""ARCHITECTURE.md: the modules, the claims and the hops that it names are those of the source."""

import ast
import itertools
import re
from pathlib import Path

import pytest

import tickwheel
from tickwheel.durable.implementations import BROKERS
from tickwheel.values.options import TaskOptions

ROOT = Path(__file__).parent.parent
PACKAGE = Path(tickwheel.__file__).parent
TEXT = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
FILES = TEXT.partition("## The files")[2].partition("```\n")[2].partition("```")[0]
HOP = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`", re.MULTILINE)
THEIR_OWN = "durable/stores", "durable/channels", "durable/coordinators"
CLOCKS = {"time", "time_ns", "monotonic", "monotonic_ns", "clock_gettime", "clock_gettime_ns"}


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__"))


def definition(path, name):
    """Return the node of a function, given its qualified name."""
    body = ast.parse((PACKAGE / path).read_text("utf-8")).body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        assert found, f"{path} has no {name}"
        body = found[0].body
    return found[0]


def names_in(node):
    """Return every name and attribute that the code of a function mentions."""
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    found |= {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    return found | {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}


def lists_of_hops():
    """Give the numbered lists of the two lives: in each, a function calls the next one."""
    for title in ("The life of a timer", "The life of a task"):
        section = TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]
        for number, part in enumerate(re.split(r"\n(?=1\. )", section)[1:], 1):
            yield pytest.param(HOP.findall(part), id=f"{title} {number}")


def test_every_module_is_in_the_list_of_files():
    words = {*re.findall(r"\w+", FILES)}
    assert {path.stem for path in modules()} - words == set()


def test_every_script_of_the_pages_is_in_the_list_of_files():
    words = {*re.findall(r"\w+", FILES.partition("static/")[2].partition("session")[0])}
    assert {path.stem for path in (PACKAGE / "web" / "static").glob("*.js")} - words == set()


@pytest.mark.parametrize("hops", [*lists_of_hops()])
def test_each_hop_of_a_life_calls_the_next(hops):
    assert len(hops) > 1
    for (path, name), (_, following) in itertools.pairwise(hops):
        called = following.rpartition(".")[2]
        assert called in names_in(definition(path, name)), f"{path} {name} calls no {called}"
    definition(*hops[-1])


def test_only_clock_reads_the_time():
    for path in modules():
        tree = ast.parse(path.read_text("utf-8"))
        read = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and ast.unparse(node.value) in ("time", "datetime", "datetime.datetime")
        }
        assert path.stem == "clock" or not read & (CLOCKS | {"now", "utcnow", "today"}), path


def test_only_one_function_of_the_native_core_reads_the_time():
    source = ROOT / "src" / "tickwheel"
    reads = re.compile(r"\b(?:clock_gettime|gettimeofday|QueryPerformanceCounter|PyTime_\w+)\(")
    found = {path.name for path in source.glob("*.[ch]") if reads.search(path.read_text("utf-8"))}
    assert found == {"_wheel.h"}


def test_only_one_file_names_stores_channels_and_coordinators():
    inside = re.compile(r"tickwheel\.durable\.(stores|channels|coordinators)\.")
    for path in modules():
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith((*THEIR_OWN, "overflow_buffers")):  # those use the stores' connections
            continue
        imported = [
            node.module
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.ImportFrom) and inside.match(f"{node.module}.")
        ]
        assert not imported or place == "durable/implementations.py", f"{place}: {imported}"


def test_each_command_is_loaded_when_it_is_called():
    tree = ast.parse((PACKAGE / "cli" / "root.py").read_text("utf-8"))
    imported = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = {
        name.name for node in imported if node.module == "tickwheel.cli" for name in node.names
    }
    names |= {node.module for node in imported if (node.module or "").startswith("tickwheel.cli.")}
    assert names == {"exit_codes", "terminal"}


def test_the_files_that_name_each_field_of_a_submit_are_those_listed_and_at_most_8():
    start = "these files name it: "
    listed = {*re.findall(r"`(.+?)`", TEXT.partition(start)[2].partition(". ")[0])}
    names = TaskOptions.__annotations__.keys() - {"delay", "at"}  # both give `due_at_ms`
    found = {
        path.relative_to(PACKAGE).as_posix()
        for path in [*modules(), *PACKAGE.rglob("*.proto")]
        if "_pb2" not in path.stem
        and all(name in path.read_text("utf-8").replace("-", "_") for name in names)
    }
    assert found == listed
    assert len(found) <= 8


def test_the_dashboard_offers_each_protocol():
    text = (PACKAGE / "web" / "static" / "services.js").read_text("utf-8")
    offered = re.findall(r'"(\w+)"', re.search(r"PROTOCOLS = \[(.*?)\]", text)[1])
    assert {*offered} == {"http", "grpc", *BROKERS}


def test_only_one_file_knows_the_schemes_of_stores():
    """The others show a URL: in a default, a help text or an example."""
    shown = {"cli/serve.py", "cli/store.py", "cli/doctor.py", "cli/top.py", "config.py"}
    schemes = re.compile(r"\b(sqlite|postgres|postgresql)://?")
    found = set()
    for path in modules():
        place = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text("utf-8"))
        documented = {*map(id, docstrings(tree))}
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        if any(schemes.search(str(one.value)) for one in texts if id(one) not in documented):
            found.add(place)
    assert found - shown == {"values/store_url.py"}


def docstrings(tree):
    """Give the nodes of all docstrings."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            yield body[0].value

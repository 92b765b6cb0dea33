"""The tree of the tests: a module is named after one of the source, or its first line covers it."""

import ast
import re
from pathlib import Path

import distribution

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src" / "tickwheel"
MODULES = sorted(HERE.rglob("test_*.py"))
MOST_LINES = 700
FEWEST_WORDS = 5
MODULE_NAME = re.compile(r"\b(?:cli|client|durable|http|receiver|values|web)(?:\.\w+)+")


def name_of(path):
    return path.relative_to(HERE).as_posix()


def is_source(path):
    return path.with_suffix(".py").exists() or path.is_dir()


def mirrors(path):
    """Return whether a test module is named after a source module, with an aspect behind it."""
    folder = SOURCE / path.relative_to(HERE).parent
    words = path.stem.split("_")[1:]
    names = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
    return any(is_source(folder / name) for name in names)


def first_line(path):
    """Return the first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]


def test_the_first_line_of_a_module_without_a_mirror_says_what_it_covers():
    lines = {name_of(path): first_line(path) for path in MODULES if not mirrors(path)}
    assert {
        name: line
        for name, line in lines.items()
        if not line.endswith(".") or len(line.split()) < FEWEST_WORDS
    } == {}


def test_every_module_that_a_first_line_names_exists():
    named = {name_of(path): MODULE_NAME.findall(first_line(path)) for path in MODULES}
    assert any(named.values())
    for test, names in named.items():
        for name in names:
            assert is_source(SOURCE.joinpath(*name.split("."))), f"{test} names {name}"


def test_no_module_is_too_long_to_read():
    lines = {name_of(path): path.read_text("utf-8").count("\n") for path in HERE.rglob("*.py")}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_every_file_that_begins_first_exists():
    names = {*distribution.listed_seconds(), *distribution.BROKERS, *distribution.SPREAD}
    assert {name for name in names if not (HERE / name).exists()} == set()

"""The pages of the reference: each public name has its place there, with its signature."""

import dataclasses
import importlib
import inspect
import re
from datetime import timedelta
from operator import attrgetter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "tickwheel"
REFERENCE = ROOT / "docs" / "reference"
# By module: the pages that have its public names.
PLACES = {
    "tickwheel": "errors idle overflow purgatory timers wheels",
    "tickwheel.celery": "integrations",
    "tickwheel.client": "client",
    "tickwheel.consumer": "consumer",
    "tickwheel.django": "integrations",
    "tickwheel.durable": "durable",
    "tickwheel.overflow_buffers": "overflow",
    "tickwheel.receiver": "receiver",
    "tickwheel.testing": "integrations",
    "tickwheel.testing.channel_suite": "integrations",
    "tickwheel.web": "integrations",
}
PRIVATE = {"tickwheel.durable.verbs", "tickwheel.http", "tickwheel.kernel"}
ALIASES = {"tickwheel.durable.buffers"}  # of tickwheel.overflow_buffers
SHOWN = re.compile(
    r"^\.\. auto(class|function|method):: (tickwheel\.[\w.]+)\((.*)\)$", re.MULTILINE
)
SIGNATURES = [
    (kind, name, words)
    for page in sorted(REFERENCE.glob("*.md"))
    for kind, name, words in SHOWN.findall(page.read_text("utf-8"))
    if words or kind in ("function", "method")  # `()` after a class: users do not make one
]


def text_of(pages):
    return "\n".join((REFERENCE / f"{page}.md").read_text("utf-8") for page in pages.split())


def modules_with_exports():
    for path in PACKAGE.rglob("*.py"):
        if re.search(r"^__all__ = ", path.read_text("utf-8"), re.MULTILINE):
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__")


def test_every_module_with_exports_is_in_the_reference_or_private():
    assert {*modules_with_exports()} == {*PLACES, *PRIVATE, *ALIASES}


def test_the_first_page_names_the_modules():
    named = re.findall(r"`(tickwheel[\w.]*)`", (REFERENCE / "index.md").read_text("utf-8"))
    assert sorted(named) == sorted(PLACES)


@pytest.mark.parametrize("module", PLACES)
def test_every_public_name_has_its_place(module):
    text = text_of(PLACES[module])
    names = importlib.import_module(module).__all__
    full = re.escape(module)
    missing = [
        name
        for name in names
        if not re.search(rf":: {full}\.{name}\b|`({full}\.)?{name}[`(]", text)
    ]
    assert missing == []


def found(name):
    """Return what a name of the reference names."""
    module = max((each for each in PLACES if name.startswith(f"{each}.")), key=len)
    return attrgetter(name.removeprefix(f"{module}."))(importlib.import_module(module))


def parameters(function):
    return [
        (one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize(("kind", "name", "words"), SIGNATURES, ids=[one[1] for one in SIGNATURES])
def test_a_signature_is_that_of_the_code(kind, name, words):
    if name == "tickwheel.durable.Scheduler.submit":
        return  # its options are in **kwargs: durable/test_docs.py compares them
    names = {"timedelta": timedelta}
    exec(f"def shown({words}): ...", names)
    actual = parameters(found(name))
    assert parameters(names["shown"]) == (actual[1:] if kind == "method" else actual)


VALUES = re.findall(r"^\| `(\w+)` \| (`.*`) \|$", text_of("client"), re.MULTILINE)


@pytest.mark.parametrize(("name", "words"), VALUES, ids=[name for name, _ in VALUES])
def test_the_fields_of_a_value_of_the_client_are_those_of_the_code(name, words):
    kind = getattr(importlib.import_module("tickwheel.client"), name)
    fields = getattr(kind, "_fields", None) or [one.name for one in dataclasses.fields(kind)]
    properties = [one for one, what in vars(kind).items() if isinstance(what, property)]
    assert {*re.findall(r"`(\w+)`", words)} == {*fields, *properties} - {"document"}


def test_signatures_of_every_kind_are_compared():
    assert {kind for kind, _, _ in SIGNATURES} == {"class", "function", "method"}


def test_the_glossary_is_sorted_and_its_channels_are_those_of_the_page_about_channels():
    glossary = text_of("glossary")
    terms = re.findall(r"^(?=[a-z])(.*)\n  \S", glossary, re.MULTILINE)
    assert terms == sorted(set(terms))
    entry = re.search(r"^channel\n((?:  .*\n)+)", glossary, re.MULTILINE)[1]
    page = (ROOT / "docs/how-to/channels.md").read_text("utf-8")
    assert set(re.findall(r"`(\w+)`", entry)) - {"protocol"} == set(
        re.findall(r"^\| \[?`(\w+)`", page, re.MULTILINE)
    )

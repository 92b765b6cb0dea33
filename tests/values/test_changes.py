"""The words of the audit log for what a change has changed."""

import json

from hypothesis import given
from hypothesis import strategies as st

from tickwheel.values.changes import DETAIL_CHARACTERS, VALUE_CHARACTERS, changes

VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.lists(st.integers())
CONFIGS = st.dictionaries(
    st.text(min_size=1, max_size=9), VALUES | st.dictionaries(st.text(max_size=5), VALUES)
)


def test_a_field_that_differs_is_named_with_both_values_and_no_other_is():
    before = {"a": 1, "b": "x", "c": [1], "d": None, "e": True}
    after = {"a": 2, "b": "x", "c": [1, 2], "d": "größe", "e": True}
    assert changes(before, after) == 'a: 1 -> 2; c: [1] -> [1, 2]; d: none -> "größe"'


def test_one_that_is_new_or_gone_was_or_is_none():
    assert changes({}, {"a": 1, "b": None}) == "a: none -> 1"
    assert changes({"a": "x"}, {}) == 'a: "x" -> none'


def test_a_field_within_a_field_has_both_names():
    before = {"backoff": {"first": 1.0, "max": 9}, "breaker": None}
    after = {"backoff": {"first": 2.0, "max": 9}, "breaker": {"failures": 3}}
    assert changes(before, after) == "backoff.first: 1.0 -> 2.0; breaker.failures: none -> 3"


def test_the_same_is_no_change():
    assert changes({"a": {"b": 1}}, {"a": {"b": 1}}) == "no change"


def test_of_a_secret_nothing_is_shown_but_what_became_of_it():
    before = {"secret": ("hush",), "headers": {"a": "hush", "b": "hush", "c": "hush"}, "rate": 1}
    after = {"secret": ("hush!",), "headers": {"b": "hush!", "c": "hush", "d": "hush"}, "rate": 2}
    said = changes(before, after, secret=("secret", "headers"))
    assert said == (
        "secret: changed; headers.a: removed; headers.b: changed; headers.d: set; rate: 1 -> 2"
    )
    assert changes({}, {"secret": "hush"}, secret=["secret"]) == "secret: set"
    assert changes({"secret": "hush"}, {"secret": None}, secret=["secret"]) == "secret: removed"


def test_a_long_value_is_cut():
    said = changes({"a": "x" * 10_000}, {"a": "y" * 10_000})
    assert said.startswith('a: "xxx')
    assert len(said) < 2 * VALUE_CHARACTERS + 20


def test_a_long_list_says_how_many_more_there_are_and_secrets_come_first():
    after = {f"field {number}": "x" * 100 for number in range(100)} | {"secret": "hush"}
    said = changes({}, after, secret=["secret"])
    assert said.startswith("secret: set; field 0: none")
    shown = said.count(";")
    assert said.endswith(f"; and {101 - shown} more")


@given(CONFIGS, CONFIGS)
def test_whatever_it_is_it_is_bounded_and_no_secret_is_in_it(before, after):
    assert len(changes(before, after)) <= DETAIL_CHARACTERS + 20
    hidden = {"s": json.dumps(before) + "hush"}
    assert "hush" not in changes(hidden, {"s": "hush" + json.dumps(after)}, secret="s")


def test_the_query_of_a_url_is_not_shown():
    before, after = (
        {"endpoint": "https://a.example/x?key=1"},
        {"endpoint": "https://b.example/?key=2"},
    )
    assert changes(before, after) == ('endpoint: "https://a.example/x?…" -> "https://b.example/?…"')

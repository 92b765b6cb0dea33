"""A service's configuration: what is stored, what is shown, what a change keeps."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.callee import URL
from tickwheel.durable.configuration import (
    MAX_SECRETS,
    PLACEHOLDER,
    configured,
    restored,
    shown_form,
    stored_form,
)
from tickwheel.durable.registry import ServiceRow
from tickwheel.durable.service import Backoff, Breaker, Service

FULL = {
    "protocol": "http", "endpoint": URL, "timeout": 12.5, "max_attempts": 7,
    "backoff": {"first": 2, "factor": 3, "max": 60, "jitter": 0.5}, "concurrency": 9, "rate": 2.5,
    "secret": "whsec_AAAA", "headers": {"authorization": "Bearer b", "x": "y"},
    "feedback_timeout": 99, "breaker": {"failures": 4, "pause": 1, "max_pause": 8, "probes": 2},
    "enabled": False,
}  # fmt: skip


def made(stored=None, **config):
    """The service that a configuration describes."""
    return configured("s", {"protocol": "http", "endpoint": URL, **config}, stored)


def sealed(text):
    return f"<{text[::-1]}>"


def unsealed(text):
    assert (text[0], text[-1]) == ("<", ">")
    return text[1:-1][::-1]


def row(service, seal=sealed):
    return ServiceRow(service.name, 3, stored_form(service, seal), 1_000)


class TestConfigured:
    def test_every_field_is_taken(self):
        assert configured("s", FULL, None) == Service(
            "s", protocol="http", endpoint=URL, timeout=12.5, max_attempts=7,
            backoff=Backoff(2, 3, 60, 0.5), concurrency=9, rate=2.5, secrets=("whsec_AAAA",),
            headers=(("authorization", "Bearer b"), ("x", "y")), feedback_timeout=99,
            breaker=Breaker(4, 1, 8, 2), enabled=False,
        )  # fmt: skip

    def test_what_is_not_given_has_its_default_and_a_breaker(self):
        meant = Service("s", protocol="http", endpoint=URL, timeout=30.0, breaker=Breaker())
        assert made() == meant

    def test_a_breaker_can_be_turned_off(self):
        assert made(breaker=None).breaker is None

    @pytest.mark.parametrize(
        ("backoff", "meant"),
        [
            (None, Backoff()),
            ({}, Backoff()),
            ({"first": 3}, Backoff(first=3)),
            (5, Backoff.of(5)),
            ([1, 5], Backoff.of([1, 5])),
            (Backoff(first=7), Backoff(first=7)),
        ],
    )
    def test_a_backoff_has_many_forms(self, backoff, meant):
        assert made(backoff=backoff).backoff == meant

    def test_a_list_of_delays_in_a_mapping_is_a_backoff(self):
        service = made(backoff={"delays": [1, 2], "jitter": 0})
        assert restored(row(service), unsealed).backoff == service.backoff
        assert [service.backoff.seconds(n) for n in (1, 2, 3)] == [1, 2, 2]
        hash(service)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"colour": "red"}, {"name": "t"}, {"version": 3}, {"secrets": ["a"]},
            {"timeout": 0}, {"timeout": -1}, {"timeout": "1"}, {"max_attempts": 0},
            {"concurrency": 0}, {"concurrency": 1.5}, {"rate": 0}, {"rate": -1}, {"rate": "1"},
            {"rate": float("nan")}, {"feedback_timeout": 0}, {"backoff": {"colour": 1}},
            {"backoff": {"first": -1}}, {"backoff": "1"}, {"backoff": {"jitter": 2}},
            {"breaker": {"colour": 1}}, {"breaker": {"failures": 0}}, {"breaker": {"pause": 0}},
            {"breaker": 5}, {"breaker": "off"}, {"enabled": "no"}, {"endpoint": 5},
            {"headers": {"a": PLACEHOLDER}}, {"headers": {"a": 5}}, {"headers": ["a"]},
            {"secret": 5}, {"secret": [5]}, {"secret": PLACEHOLDER}, {"secret": ["a", PLACEHOLDER]},
        ],
        ids=str,
    )  # fmt: skip
    def test_what_cannot_be_right_is_refused(self, wrong):
        with pytest.raises((ValueError, TypeError)):
            made(**wrong)

    def test_the_mapping_is_left_as_it_was(self):
        before = json.dumps(FULL)
        configured("s", FULL, None)
        assert json.dumps(FULL) == before


class TestPlaceholder:
    STORED = made(secret=["new", "old"], headers={"a": "1", "b": "2"})

    def test_it_keeps_what_is_stored(self):
        again = made(self.STORED, secret=PLACEHOLDER, headers={"b": PLACEHOLDER, "a": "3"})
        assert again.secrets == ("new", "old")
        assert dict(again.headers) == {"a": "3", "b": "2"}

    def test_with_another_before_it_it_rotates(self):
        assert made(self.STORED, secret=["newest", PLACEHOLDER]).secrets == ("newest", "new", "old")

    def test_a_secret_that_is_there_already_is_there_once(self):
        assert made(self.STORED, secret=["old", PLACEHOLDER]).secrets == ("old", "new")

    def test_the_oldest_leave_when_there_are_many(self):
        service = self.STORED
        for number in range(20):
            service = made(service, secret=[f"number {number}", PLACEHOLDER])
        assert service.secrets == tuple(f"number {n}" for n in range(19, 19 - MAX_SECRETS, -1))

    def test_one_that_is_there_already_pushes_no_other_out(self):
        five = made(secret=list("abcde"))
        assert made(five, secret=["c", PLACEHOLDER]).secrets == ("c", "a", "b", "d", "e")

    @pytest.mark.parametrize("secret", [None, []])
    def test_what_is_not_given_is_gone(self, secret):
        assert made(self.STORED, secret=secret).secrets == ()
        assert made(self.STORED).secrets == ()
        assert made(self.STORED).headers == ()

    def test_what_is_shown_can_be_given_back_and_changes_nothing(self):
        stored = configured("s", FULL, None)
        assert configured("s", shown_form(stored), stored) == stored


class TestForms:
    def test_what_is_stored_comes_back(self):
        service = configured("s", FULL, None)
        again = restored(row(service), unsealed)
        assert again.version == 3
        assert shown_form(again) == shown_form(service)
        assert (again.secrets, again.headers) == (service.secrets, service.headers)

    @given(
        timeout=st.none() | st.floats(0.001, 1e6),
        backoff=st.lists(st.floats(0, 1e5), min_size=1, max_size=4) | st.floats(0, 1e5),
        rate=st.none() | st.floats(0.001, 1e6),
        breaker=st.none() | st.builds(dict, failures=st.integers(1, 99), probes=st.integers(1, 9)),
        secret=st.lists(st.text(min_size=1), max_size=3, unique=True),
        headers=st.dictionaries(st.text(min_size=1), st.text(), max_size=3),
    )
    def test_whatever_it_is_it_is_stored_and_restored(self, **config):
        config["secret"] = [one for one in config["secret"] if one != PLACEHOLDER]
        service = made(**config)
        again = restored(row(service), unsealed)
        assert [getattr(again, name) for name in Service.__slots__ if name != "version"] == [
            getattr(service, name) for name in Service.__slots__ if name != "version"
        ]

    def test_what_is_stored_has_its_secrets_and_headers_sealed(self):
        form = stored_form(configured("s", FULL, None), sealed)
        assert "whsec_AAAA" not in form
        assert "Bearer b" not in form
        assert json.loads(form)["secret"] == [sealed("whsec_AAAA")]

    def test_what_is_shown_has_neither(self):
        shown = shown_form(configured("s", FULL, None))
        assert shown["secret"] == PLACEHOLDER
        assert shown["headers"] == {"authorization": PLACEHOLDER, "x": PLACEHOLDER}
        assert shown_form(made())["secret"] is None
        assert "whsec_AAAA" not in repr(configured("s", FULL, None))
        assert "Bearer b" not in repr(configured("s", FULL, None))

    def test_a_field_of_a_later_version_is_passed_over(self):
        config = {**json.loads(stored_form(made(), sealed)), "colour": "red"}
        assert restored(ServiceRow("s", 1, json.dumps(config), 0), unsealed).endpoint == URL

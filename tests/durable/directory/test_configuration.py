"""A service's configuration: what is stored, what is shown, what a change keeps."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.callee import URL
from tickwheel.durable.directory.configuration import (
    MAX_SECRETS,
    PLACEHOLDER,
    origin_of,
    public_config,
    sealed_config,
    service_changes,
    service_from_config,
    service_from_row,
)
from tickwheel.durable.directory.vault import Vault
from tickwheel.durable.registry import ServiceRow
from tickwheel.values.endpoint import parse_endpoint
from tickwheel.values.service import Backoff, Breaker, Service

FULL = {
    "protocol": "http", "endpoint": URL, "timeout": 12.5, "max_attempts": 7,
    "backoff": {"first": 2, "factor": 3, "max": 60, "jitter": 0.5}, "concurrency": 9, "rate": 2.5,
    "secret": "whsec_AAAA", "headers": {"authorization": "Bearer b", "x": "y"},
    "feedback_timeout": 99, "breaker": {"failures": 4, "pause": 1, "max_pause": 8, "probes": 2},
    "enabled": False, "confirmed": "running", "cloudevents": "binary",
}  # fmt: skip


def made(stored=None, **config):
    """The service that a configuration describes."""
    return service_from_config("s", {"protocol": "http", "endpoint": URL, **config}, stored)


def sealed(text, owner):
    return f"<{text[::-1]}>{owner}"


def unsealed(text, owner):
    assert (text[0], text[-len(owner) - 1 :]) == ("<", f">{owner}")
    return text[1 : -len(owner) - 1][::-1]


def row(service, seal=sealed):
    return ServiceRow(service.name, 3, sealed_config(service, seal), 1_000)


class TestConfigured:
    def test_every_field_can_be_configured(self):
        assert service_from_config("s", FULL, None) == Service(
            "s", protocol="http", endpoint=URL, timeout=12.5, max_attempts=7,
            backoff=Backoff(2, 3, 60, 0.5), concurrency=9, rate=2.5, secrets=("whsec_AAAA",),
            headers=(("authorization", "Bearer b"), ("x", "y")), feedback_timeout=99,
            breaker=Breaker(4, 1, 8, 2), enabled=False, confirmed="running", cloudevents="binary",
        )  # fmt: skip

    def test_omitted_fields_have_defaults_and_a_breaker(self):
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
        assert service_from_row(row(service), unsealed).backoff == service.backoff
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
    def test_invalid_configurations_are_refused(self, wrong):
        with pytest.raises((ValueError, TypeError)):
            made(**wrong)

    def test_the_given_mapping_is_not_changed(self):
        before = json.dumps(FULL)
        service_from_config("s", FULL, None)
        assert json.dumps(FULL) == before


class TestPlaceholder:
    STORED = made(secret=["new", "old"], headers={"a": "1", "b": "2"})

    def test_the_placeholder_keeps_the_stored_secret(self):
        again = made(self.STORED, secret=PLACEHOLDER, headers={"b": PLACEHOLDER, "a": "3"})
        assert again.secrets == ("new", "old")
        assert dict(again.headers) == {"a": "3", "b": "2"}

    def test_a_new_secret_before_the_placeholder_rotates(self):
        assert made(self.STORED, secret=["newest", PLACEHOLDER]).secrets == ("newest", "new", "old")

    def test_a_repeated_secret_is_stored_once(self):
        assert made(self.STORED, secret=["old", PLACEHOLDER]).secrets == ("old", "new")

    def test_the_oldest_secrets_beyond_the_limit_are_dropped(self):
        service = self.STORED
        for number in range(20):
            service = made(service, secret=[f"number {number}", PLACEHOLDER])
        assert service.secrets == tuple(f"number {n}" for n in range(19, 19 - MAX_SECRETS, -1))

    def test_a_repeated_secret_drops_no_other(self):
        five = made(secret=list("abcde"))
        assert made(five, secret=["c", PLACEHOLDER]).secrets == ("c", "a", "b", "d", "e")

    def test_omitted_secrets_and_headers_stay(self):
        again = made(self.STORED, rate=5)
        assert (again.secrets, again.headers) == (self.STORED.secrets, self.STORED.headers)
        again = made(self.STORED, secret="newest")
        assert (again.secrets, again.headers) == (("newest",), self.STORED.headers)
        again = made(self.STORED, headers={"c": "3"})
        assert (again.secrets, again.headers) == (self.STORED.secrets, (("c", "3"),))

    @pytest.mark.parametrize("nothing", [None, [], ()])
    def test_none_removes_secrets_and_headers(self, nothing):
        assert made(self.STORED, secret=nothing).secrets == ()
        assert made(self.STORED, headers=None).headers == ()
        assert made(self.STORED, headers={}).headers == ()
        assert made(self.STORED, secret=nothing, headers=None).endpoint == URL

    def test_a_secret_that_cannot_be_opened_here_cannot_be_kept_or_lost(self):
        hidden = service_from_row(row(self.STORED), lambda *_: PLACEHOLDER)
        for config in ({}, {"headers": None}, {"secret": "newest"}):
            with pytest.raises(ValueError, match="cannot be kept"):
                made(hidden, **config)
        assert made(hidden, secret="newest", headers=None).secrets == ("newest",)

    def test_the_public_configuration_can_be_put_back_unchanged(self):
        stored = service_from_config("s", FULL, None)
        assert service_from_config("s", public_config(stored), stored) == stored


class TestOrigin:
    STORED = made(secret=["new", "old"], headers={"a": "1", "b": "2"})
    OTHERS = (
        "https://evil.example/", "http://callee.example/", "https://callee.example:444/",
        "https://callee.example.evil.example/", "https://xcallee.example/", "https://10.0.0.1/",
    )  # fmt: skip

    @pytest.mark.parametrize("endpoint", OTHERS)
    @pytest.mark.parametrize(
        ("config", "named"),
        [
            ({}, "secret, the header 'a', the header 'b'"),
            ({"secret": PLACEHOLDER, "headers": None}, "secret"),
            ({"secret": ["newest", PLACEHOLDER], "headers": {}}, "secret"),
            ({"secret": None}, "the header 'a', the header 'b'"),
            ({"secret": "newest", "headers": {"a": "3", "b": PLACEHOLDER}}, "the header 'b'"),
        ],
        ids=str,
    )
    def test_another_origin_needs_the_secrets_again(self, endpoint, config, named):
        with pytest.raises(ValueError, match="no other origin") as raised:
            made(self.STORED, endpoint=endpoint, **config)
        assert f"give {named} again" in str(raised.value)
        assert endpoint not in str(raised.value)

    @pytest.mark.parametrize("endpoint", OTHERS)
    def test_another_origin_is_accepted_with_new_or_removed_secrets(self, endpoint):
        moved = made(self.STORED, endpoint=endpoint, secret="newest", headers={"a": "3"})
        assert (moved.secrets, moved.headers) == (("newest",), (("a", "3"),))
        bare = made(self.STORED, endpoint=endpoint, secret=None, headers=None)
        assert (bare.secrets, bare.headers) == ((), ())

    def test_a_service_without_secrets_may_move(self):
        assert made(made(), endpoint="https://b.example/").endpoint == "https://b.example/"

    @pytest.mark.parametrize(
        "endpoint",
        ["https://callee.example/other?q=1", "https://callee.example", "https://callee.example:443/",
         "HTTPS://Callee.Example/x"],
    )  # fmt: skip
    def test_another_path_on_the_same_origin_keeps_the_secrets(self, endpoint):
        assert made(self.STORED, endpoint=endpoint).secrets == self.STORED.secrets

    @pytest.mark.parametrize(
        ("endpoint", "origin"),
        [
            ("https://a.example/x", "https://a.example:443"),
            ("http://A.example:8080", "http://a.example:8080"),
            ("http://[::1]:80/", "http://::1:80"),
            ("https://a.example:x/", "https://a.example:x/"),
            ("not a url", "not a url"),
            ("", ""),
            (5, "5"),
        ],
    )
    def test_the_text_of_an_origin_never_changes_since_secrets_are_bound_to_it(
        self, endpoint, origin
    ):
        assert origin_of(endpoint) == origin


class TestForms:
    def test_a_stored_service_is_restored(self):
        service = service_from_config("s", FULL, None)
        again = service_from_row(row(service), unsealed)
        assert again.version == 3
        assert public_config(again) == public_config(service)
        assert (again.secrets, again.headers) == (service.secrets, service.headers)

    @given(
        timeout=st.none() | st.floats(0.001, 1e6),
        backoff=st.lists(st.floats(0, 1e5), min_size=1, max_size=4) | st.floats(0, 1e5),
        rate=st.none() | st.floats(0.001, 1e6),
        breaker=st.none() | st.builds(dict, failures=st.integers(1, 99), probes=st.integers(1, 9)),
        secret=st.lists(st.text(min_size=1), max_size=3, unique=True),
        headers=st.dictionaries(st.text(min_size=1), st.text(), max_size=3),
    )
    def test_any_service_is_stored_and_restored(self, **config):
        config["secret"] = [one for one in config["secret"] if one != PLACEHOLDER]
        service = made(**config)
        again = service_from_row(row(service), unsealed)
        assert [getattr(again, name) for name in Service.__slots__ if name != "version"] == [
            getattr(service, name) for name in Service.__slots__ if name != "version"
        ]

    def test_the_stored_form_has_sealed_secrets_and_headers(self):
        form = sealed_config(service_from_config("s", FULL, None), sealed)
        assert "whsec_AAAA" not in form
        assert "Bearer b" not in form
        owner = json.dumps(["s", "https://callee.example:443", "secret"])
        assert json.loads(form)["secret"] == [sealed("whsec_AAAA", owner)]

    @pytest.mark.parametrize(
        "move",
        [
            lambda row, config: row._replace(name="t"),
            lambda row, config: row._replace(name="acme/s"),
            lambda row, config: row._replace(
                config=json.dumps({**config, "endpoint": "https://evil.example/"})
            ),
            lambda row, config: row._replace(
                config=json.dumps({**config, "headers": {"x": config["headers"]["authorization"]}})
            ),
            lambda row, config: row._replace(
                config=json.dumps({**config, "headers": {"x": config["secret"][0]}})
            ),
        ],
        ids=["service", "namespace", "origin", "header", "field"],
    )
    def test_a_sealed_secret_opens_for_its_own_service_and_field_only(self, move):
        vault = Vault("a key of 16 or more")
        stored = row(service_from_config("s", FULL, None), vault.seal)
        assert service_from_row(stored, vault.open).secrets == ("whsec_AAAA",)
        with pytest.raises(ValueError, match="another service, header or origin"):
            service_from_row(move(stored, json.loads(stored.config)), vault.open)

    def test_the_public_form_has_no_secrets_or_header_values(self):
        shown = public_config(service_from_config("s", FULL, None))
        assert shown["secret"] == PLACEHOLDER
        assert shown["headers"] == {"authorization": PLACEHOLDER, "x": PLACEHOLDER}
        assert public_config(made())["secret"] is None
        assert "whsec_AAAA" not in repr(service_from_config("s", FULL, None))
        assert "Bearer b" not in repr(service_from_config("s", FULL, None))

    def test_a_field_of_a_later_version_is_ignored(self):
        config = {**json.loads(sealed_config(made(), sealed)), "colour": "red"}
        assert service_from_row(ServiceRow("s", 1, json.dumps(config), 0), unsealed).endpoint == URL


class TestPassword:
    URL = "amqp://user:p%40ss@mq.example:5672/shop?exchange=orders"
    SHOWN = "amqp://user:********@mq.example:5672/shop?exchange=orders"

    def test_it_leaves_the_endpoint_and_is_shown_nowhere(self):
        service = made(endpoint=self.URL)
        assert (service.endpoint, service.password) == (self.SHOWN, "p%40ss")
        assert public_config(service)["endpoint"] == self.SHOWN
        assert "password" not in public_config(service)
        assert "p%40ss" not in f"{service!r} {json.dumps(public_config(service))}"
        assert service_changes(None, service).startswith("password: set")
        assert "p%40ss" not in service_changes(made(endpoint=URL), service)

    def test_a_user_without_a_password_may_be_a_token(self):
        service = made(endpoint="nats://t%3Aoken@mq.example:4222?subject=orders")
        assert service.endpoint == "nats://********@mq.example:4222?subject=orders"
        endpoint = parse_endpoint(service.endpoint, service.password, {"nats": 4222})
        assert (endpoint.user, endpoint.password) == ("t:oken", "")

    def test_it_is_sealed_in_the_store_and_comes_back(self):
        service = made(endpoint=self.URL)
        stored = row(service)
        assert "p%40ss" not in stored.config
        assert service_from_row(stored, unsealed).password == "p%40ss"

    def test_a_shown_endpoint_keeps_it_on_its_origin_only(self):
        service = made(endpoint=self.URL)
        again = made(service, endpoint=self.SHOWN.replace("orders", "mail"))
        assert again.password == "p%40ss"
        with pytest.raises(ValueError, match="give the endpoint's password again"):
            made(service, endpoint=self.SHOWN.replace("mq.example", "mq.elsewhere"))
        with pytest.raises(ValueError, match="no stored password to keep"):
            made(made(endpoint="amqp://mq.example:5672/"), endpoint=self.SHOWN)

    def test_a_cluster_of_hosts_is_one_origin(self):
        hosts = "kafka://u:p@a:9092,B:9093/orders"
        assert origin_of(hosts) == origin_of("kafka://v:q@a:9092,b:9093/mail?x=1")
        assert origin_of(hosts) != origin_of("kafka://u:p@a:9092,c:9093/orders")

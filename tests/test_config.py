"""The configuration: precedence of its sources, and errors for invalid values."""

import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from tickwheel.config import (
    MASK,
    SETTINGS,
    Config,
    ConfigError,
    Listen,
    find_mistyped,
    load,
    parse_duration,
    without_password,
)

KEY = "hunter2" * 3


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(text, name="tickwheel.toml"):
    Path(name).write_text(text, "utf-8")
    return name


def load_config(flags=None, environ=None, file=None):
    return load(flags or {}, environ or {}, file)


def test_the_defaults():
    config, origins = load_config()
    assert config == Config()
    assert config.listen == ("127.0.0.1", 7380)
    assert set(origins.values()) == {"default"}


def test_a_flag_overrides_the_environment_which_overrides_the_file():
    write('listen = "127.0.0.1:1"\nworkers = 1\nhorizon = 5\n')
    environ = {"TICKWHEEL_LISTEN": "127.0.0.1:2", "TICKWHEEL_HORIZON": "6"}
    config, origins = load_config({"listen": "127.0.0.1:3"}, environ)
    assert config.listen.port == 3
    assert config.horizon == 6
    assert config.workers == 1
    assert origins["listen"] == "flag --listen"
    assert origins["horizon"] == "environment TICKWHEEL_HORIZON"
    assert origins["workers"] == "file tickwheel.toml"
    assert origins["cap"] == "default"


def test_a_flag_can_turn_off_a_switch_of_the_file():
    write("submit_only = true")
    assert load_config()[0].submit_only
    assert not load_config({"submit_only": False})[0].submit_only


def test_the_file_is_the_given_one_then_the_environments_then_the_default():
    write("cap = 1")
    write("cap = 2", "two.toml")
    write("cap = 3", "three.toml")
    assert load_config()[0].cap == 1
    assert load_config({}, {"TICKWHEEL_CONFIG": "two.toml"})[0].cap == 2
    assert load_config({}, {"TICKWHEEL_CONFIG": "two.toml"}, "three.toml")[0].cap == 3


def test_a_named_file_must_exist():
    with pytest.raises(ConfigError, match=r"gone\.toml: no such file"):
        load_config(file="gone.toml")
    with pytest.raises(ConfigError, match=r"gone\.toml: no such file"):
        load_config({}, {"TICKWHEEL_CONFIG": "gone.toml"})


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match="directory"):
        load_config(file=tmp_path)
    Path("latin.toml").write_bytes(b"node = '\xe9'")
    with pytest.raises(ConfigError, match=r"latin\.toml: it is not UTF-8"):
        load_config(file="latin.toml")
    with pytest.raises(ConfigError, match="is not TOML: Invalid value"):
        load_config(file=write("listen =", "bad.toml"))


def test_an_unknown_setting_is_named_with_the_nearest_known_one():
    with pytest.raises(ConfigError, match=r"tickwheel\.toml: unknown setting 'lisen'.*'listen'"):
        load_config(file=write("lisen = 1"))
    with pytest.raises(ConfigError, match="unknown setting 'zzz'; settings are store, listen"):
        load_config(file=write("zzz = 1"))


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("workers = '2'", "workers must be a whole number from 1 to 256; got '2'"),
        ("workers = true", "got True"),
        ("workers = 2.5", "got 2.5"),
        ("workers = 0", "got 0"),
        ("submit_only = 1", "submit_only must be true or false; got 1"),
        ("submit_only = 'yes'", "got 'yes'"),
        ("listen = 7380", "listen must be HOST:PORT"),
        ("weight = 0", "weight must be a number from 0.01 to 1000; got 0"),
        ("advertise = 'ftp://a'", "advertise must be an http:// or https:// URL without a path"),
        ("advertise = 'http://a/b'", "URL without a path"),
        ("advertise = 'http://u:p@a'", "URL without a path"),
        ("allow_target = '10.0.0.0/8'", "allow_target must be networks"),
        ("allow_target = [10]", "allow_target must be networks"),
        ("horizon = nan", "horizon must be a duration"),
        ("horizon = inf", "horizon must be a duration"),
        ("log_level = 'loud'", "log_level must be debug, info, warning or error; got 'loud'"),
        ("[store]\nurl = 'x'", "store must be sqlite:///PATH"),
        ("max_body = -1", "max_body must be a number of bytes"),
    ],
)
def test_an_invalid_value_in_the_file_is_reported_with_what_would_be_valid(toml, message):
    with pytest.raises(ConfigError) as raised:
        load_config(file=write(toml))
    assert str(raised.value).startswith("tickwheel.toml: ")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LISTEN", "7380"),
        ("LISTEN", ":7380"),
        ("LISTEN", "::1:7380"),
        ("LISTEN", "[127.0.0.1]:80"),
        ("LISTEN", "127.0.0.1:65536"),
        ("LISTEN", "a b:80"),
        ("STORE", "mysql://h/db"),
        ("STORE", "sqlite://tasks.db"),
        ("STORE", "sqlite:///:memory:"),
        ("STORE", "tasks.db"),
        ("COORDINATOR", "etcd"),
        ("COORDINATOR", "zookeeper:127.0.0.1:2181"),
        ("ALLOW_TARGET", "10.0.0.0/8,all"),
        ("ALLOW_TARGET", "10.0.0.1/8"),
        ("WORKERS", "many"),
        ("SUBMIT_ONLY", "maybe"),
        ("MAX_BODY", "16 parsecs"),
        ("RETENTION", "-5"),
        ("GRACE", "soon"),
        ("TOKEN_RATE", "nan"),
        ("OTLP_ENDPOINT", "collector:4318"),
    ],
)
def test_an_invalid_variable_is_named(name, value):
    with pytest.raises(ConfigError) as raised:
        load_config({}, {f"TICKWHEEL_{name}": value})
    assert str(raised.value).startswith(f"TICKWHEEL_{name} must be ")
    assert repr(value) in str(raised.value)
    assert raised.value.code == "config_error"


def test_an_invalid_flag_is_named():
    with pytest.raises(ConfigError, match=r"^--workers must be a whole number.*got 'x'"):
        load_config({"workers": "x"})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("listen", "[::1]:80", Listen("::1", 80)),
        ("listen", "localhost:0", Listen("localhost", 0)),
        ("store", "sqlite:////var/lib/t.db", "sqlite:////var/lib/t.db"),
        ("allow_target", "10.0.0.0/8, fd00::/8", ("10.0.0.0/8", "fd00::/8")),
        ("max_body", "2MiB", 2 << 20),
        ("max_body", "5 kb", 5000),
        ("max_body", "4096", 4096),
        ("retention", "7d", 604_800.0),
        ("audit_retention", "400d", 34_560_000.0),
        ("grace", "0", 0.0),
        ("submit_only", "On", True),
        ("submit_only", "0", False),
        ("log_format", "JSON", "json"),
        ("token_rate", "2.5", 2.5),
        ("open_access", "yes", True),
    ],
)
def test_a_variable_is_read(name, text, value):
    variable = next(setting.variable for setting in SETTINGS if setting.field == name)
    assert getattr(load_config({}, {variable: text})[0], name) == value


def test_the_file_may_have_every_setting_except_secrets():
    write(
        """
        store = "postgresql://u@h/db"
        listen = "0.0.0.0:80"
        grpc_listen = "0.0.0.0:90"
        coordinator = "postgres"
        node = "a"
        weight = 2
        advertise = "https://a.example:7380/"
        shards = 8
        workers = 2
        submit_only = true
        allow_private_targets = true
        allow_target = ["10.0.0.0/8"]
        tls_cert = "c.pem"
        tls_key = "k.pem"
        grpc_client_ca = "a.pem"
        grpc_ca = "a.pem"
        grpc_cert = "c.pem"
        grpc_key = "k.pem"
        insecure_without_tokens = true
        token_rate = 5
        max_connections = 5000
        max_calls = 700
        max_body = "1MiB"
        max_batch = 10
        max_payload = 1000
        retention = "1d"
        audit_retention = "1d"
        grace = 1
        horizon = 2.5
        cap = 9
        log_level = "debug"
        log_format = "json"
        otlp_endpoint = "http://collector:4318"
        """
    )
    config, origins = load_config()
    assert {name for name, origin in origins.items() if origin == "default"} == {"secret_key"}
    assert config.open_access
    assert (config.weight, config.advertise) == (2.0, "https://a.example:7380")
    assert config.tls_cert == Path("c.pem")
    assert (config.retention, config.audit_retention) == (86_400, 86_400)
    assert Config().audit_retention is None


def test_a_secret_may_only_be_in_the_environment():
    two = f"{KEY} , {KEY}2"
    assert load_config({}, {"TICKWHEEL_SECRET_KEY": two})[0].secret_key == f"{KEY},{KEY}2"
    with pytest.raises(ConfigError, match="16 or more characters") as raised:
        load_config({}, {"TICKWHEEL_SECRET_KEY": f"{KEY},hunter2"})
    assert "hunter2" not in str(raised.value)
    with pytest.raises(ConfigError, match="TICKWHEEL_SECRET_KEY in the environment") as raised:
        load_config(file=write("secret_key = 'hunter2'"))
    assert "hunter2" not in str(raised.value)
    assert all(setting.flag is None for setting in SETTINGS if setting.secret)


def test_no_secret_is_shown():
    config, _ = load_config(
        {"store": "postgresql://u:hunter2@h/db?password=hunter2"},
        {"TICKWHEEL_SECRET_KEY": KEY, "TICKWHEEL_OTLP_ENDPOINT": "http://u:hunter2@c/"},
    )
    assert "hunter2" not in repr(config)
    assert "hunter2" not in repr([s.mask(getattr(config, s.field)) for s in SETTINGS])
    assert "hunter2" in config.store
    for store in (
        "postgresqll://u:hunter2@h/db",
        "host=db.example.org user=u password=hunter2",
        "postgresql:host=db.example.org password='hun ter2'",
        "u/hunter2@h",
    ):
        with pytest.raises(ConfigError, match=r"^TICKWHEEL_STORE must be sqlite://") as raised:
            load_config({}, {"TICKWHEEL_STORE": store})
        assert "ter2" not in str(raised.value)
        with pytest.raises(ConfigError, match=r"^--store must be sqlite://") as raised:
            load_config({"store": store})
        assert "ter2" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"^--store must be sqlite:///PATH"):
        load_config({"store": "memory://"})  # it would be lost with the server
    with pytest.raises(ConfigError) as raised:
        load_config({}, {"TICKWHEEL_SECRET_KEY": KEY + "\x07"})
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:p@h/db", f"postgresql://u:{MASK}@h/db"),
        ("postgresql://u:p@ss@h:1/db", f"postgresql://u:{MASK}@h:1/db"),
        ("postgresql://u:p/w@h/db", f"postgresql://u:{MASK}@h/db"),
        ("postgresql://u@h:5432/db", "postgresql://u@h:5432/db"),
        ("postgresql://h/db?sslmode=require&password=p", f"postgresql://h/db?sslmode=require&password={MASK}"),
        ("postgresql://u:hunter2/db", f"postgresql://u:{MASK}/db"),
        ("postgresql://h:1,[::1]:5432/db", "postgresql://h:1,[::1]:5432/db"),
        ("postgresql://[::1]:5432/db", "postgresql://[::1]:5432/db"),
        ("postgresql://host=h password=p user=u", f"postgresql://host=h password={MASK} user=u"),
        ("host=h password=p", f"host=h password={MASK}"),
        ("https://collector:4318/v1", "https://collector:4318/v1"),
        ("sqlite:///a:b@c.db", "sqlite:///a:b@c.db"),
    ],
)  # fmt: skip
def test_a_url_is_shown_without_its_password(url, shown):
    assert without_password(url) == shown


def test_an_empty_variable_is_not_set():
    config, origins = load_config({}, {"TICKWHEEL_LISTEN": "", "TICKWHEEL_NODE": "  "})
    assert config == Config()
    assert origins["listen"] == "default"


def test_a_repeated_flag_is_a_list_and_an_empty_list_is_not_given():
    environ = {"TICKWHEEL_ALLOW_TARGET": "10.0.0.0/8"}
    assert load_config({"allow_target": ()}, environ)[0].allow_target == ("10.0.0.0/8",)
    two = ("192.168.0.0/16", "fd00::/8")
    assert load_config({"allow_target": two}, environ)[0].allow_target == two


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tls_cert": Path("c")}, "tls_cert is set and tls_key is not"),
        ({"tls_key": Path("k")}, "tls_key is set and tls_cert is not"),
        ({"grpc_cert": Path("c")}, "grpc_cert is set and grpc_key is not"),
        ({"grpc_key": Path("k")}, "grpc_key is set and grpc_cert is not"),
        ({"grpc_client_ca": Path("a")}, "it needs grpc_listen, tls_cert and tls_key"),
        ({"workers": 2}, "more than one worker needs a store on PostgreSQL"),
        ({"coordinator": "postgres"}, "it must be solo"),
        ({"weight": 2.0}, "weight is 2 and the coordinator is solo: one node owns every shard"),
        ({"max_payload": 2 << 20, "max_body": 1024}, "max_payload is 2MiB and max_body is 1KiB"),
    ],
)
def test_contradicting_settings_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Config(**given)


@pytest.mark.parametrize(
    ("variable", "meant"),
    [("LISTN", "LISTEN"), ("WORKER", "WORKERS"), ("LOGLEVEL", "LOG_LEVEL"), ("SERVERS", "SERVER")],
)
def test_a_mistyped_variable_is_found(variable, meant):
    assert find_mistyped({f"TICKWHEEL_{variable}": "x"}) == {
        f"TICKWHEEL_{variable}": f"TICKWHEEL_{meant}"
    }


def test_variables_of_other_programs_are_ignored():
    kubernetes = ("PORT", "SERVICE_HOST", "SERVICE_PORT", "PORT_7380_TCP", "PORT_7380_TCP_ADDR")
    names = [*(setting.variable for setting in SETTINGS), "PATH", "TICKWHEEL_WEBHOOK_SECRET"]
    names += [f"TICKWHEEL_{name}" for name in (*kubernetes, "TOKEN", "CONFIG", "TEST_CORE")]
    assert find_mistyped(dict.fromkeys(names, "x")) == {}


def test_a_config_is_frozen_and_can_be_pickled():
    config = Config(store="postgresql://h/db", workers=3)
    with pytest.raises(FrozenInstanceError):
        config.workers = 4
    assert pickle.loads(pickle.dumps(config)) == config


def test_every_setting_has_help_and_a_variable():
    for setting in SETTINGS:
        assert setting.help.endswith(".")
        assert setting.variable.startswith("TICKWHEEL_")
    names = {setting.flag for setting in SETTINGS}
    assert {"--store", "--listen", "--allow-target", "--insecure-without-tokens"} <= names


def test_every_default_is_valid():
    for setting in SETTINGS:
        if setting.default not in (None, ()):
            kind = setting.kind
            shown = setting.mask(setting.default)
            assert kind.of_file(shown) == setting.default
            assert kind.of_text(setting.format(setting.default)) == setting.default


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("retention", 604_800.0, "7d"), ("grace", 90.0, "90s"), ("horizon", 2.5, "2.5s"),
        ("grace", 0.0, "0s"), ("grace", 5400.0, "90m"), ("max_body", 1 << 20, "1MiB"),
        ("max_body", 1500, "1500"),
        ("allow_target", ("10.0.0.0/8", "fd00::/8"), "10.0.0.0/8, fd00::/8"),
    ],
)  # fmt: skip
def test_a_value_is_formatted_as_a_user_would_type_it(name, value, text):
    setting = next(setting for setting in SETTINGS if setting.field == name)
    assert setting.format(value) == text
    assert setting.kind.of_text(text) == value


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30), ("1.5", 1.5), ("250ms", 0.25), ("30s", 30), ("5m", 300), ("1h30m", 5400),
        ("1d", 86_400), ("2w", 1_209_600), (" 2 H ", 7200), ("0", 0), ("1e3", 1000),
    ],
)  # fmt: skip
def test_a_duration_is_parsed(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "5x", "5m 3", "1h-3m", "inf", "nan", "1..5s", "five"])
def test_an_invalid_duration_is_refused(text):
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)

"""The cores under test: every wheel test runs on the pure wheels and on the native ones.

- TICKWHEEL_TEST_CORE=native (or pure) runs one of them only: what `make sanitize` does.
- TICKWHEEL_TEST_PURE_ONLY=1 means that the native module is missing on purpose. Without it, a
  native module that cannot be imported fails the native tests.
"""

import gc
import itertools
import logging
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.entropy import deterministic_PRNG

sys.path.insert(0, str(Path(__file__).parent))  # cores, model, servers: under every import mode

import broker_servers
import cores as wheel_cores
import distribution
import run_record
import servers
from tickwheel.durable.stores.sqlite import connection as sqlite_connection

# A shell without job control starts what runs in the background with interrupts ignored, and
# children inherit that: the tests that interrupt one would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


settings.register_profile(
    "tickwheel",
    deadline=None,  # no timing decides a test
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("thorough", settings.get_profile("tickwheel"), max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tickwheel"))


def pytest_configure(config):
    run_record.register(config)
    config.addinivalue_line("markers", "soak: a long random run; select it with -m soak")
    config.addinivalue_line("markers", "chaos: hundreds of kills; select it with -m chaos")
    if folder := servers.data_folder():  # temporary files in memory, as the data of servers
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", folder)


def pytest_report_header(config):
    return f"wheel cores under test: {', '.join(wheel_cores.NAMES)}"


def pytest_collection_modifyitems(config, items):
    """Leaves the long forms out of an ordinary run; `-m soak` and `-m chaos` run them."""
    for name in ("soak", "chaos"):
        if name in (config.option.markexpr or "").replace(f"not {name}", ""):
            continue
        skip = pytest.mark.skip(reason=f"a long form: run it with -m {name}")
        for item in items:
            if item.get_closest_marker(name):
                item.add_marker(skip)
    if hasattr(config, "workerinput"):
        distribution.begin_with_long_files(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return distribution.make_scheduler(config, log)


def freeze_heap():
    """Hide all that exists from the collector, so that full collections are cheap."""
    with deterministic_PRNG():  # Hypothesis warns if it then cannot see who refers to its random
        pass
    gc.collect()
    gc.freeze()


def pytest_collection_finish(session):
    freeze_heap()


def _load(name):
    try:
        return wheel_cores.load(name)
    except ImportError as missing:
        pytest.fail(f"the {name} core cannot be imported: {missing}", pytrace=False)


@pytest.fixture(params=wheel_cores.NAMES)
def core(request):
    """Wheel, SimpleWheel, RoundsWheel and Entry, of the pure module or of the native one."""
    return _load(request.param)


@pytest.fixture(params=[("pure", "native")], ids=["pure-and-native"])
def both(request):
    """The two cores side by side, for what must be the same to the last detail."""
    if wheel_cores.PURE_ONLY:
        pytest.skip("TICKWHEEL_TEST_PURE_ONLY=1: there is no native core to compare with")
    return [_load(name) for name in request.param]


@pytest.fixture(params=["own", "pushed"])
def pointers(request):
    """R4's two ways for the pointers of a hierarchy to move."""
    return request.param


@pytest.fixture(scope="module")
def young_heap():
    """Hides what earlier modules left as well."""
    freeze_heap()


def log_settings():
    """Return what decides whether a line of the log reaches `caplog`."""
    ours = [name for name in logging.root.manager.loggerDict if name.startswith("tickwheel")]
    return [logging.root.manager.disable, logging.root.level] + [
        (name, logger.level, logger.disabled, logger.propagate)
        for name in sorted(ours)
        for logger in [logging.getLogger(name)]
        if logger.level or logger.disabled or not logger.propagate
    ]


@pytest.fixture(autouse=True)
def log_left_alone():
    """Fails the test that changes the log of all later tests in its process."""
    before = log_settings()
    yield
    assert log_settings() == before


WAIT_FOR_DISK = sqlite_connection.WAIT_FOR_DISK
sqlite_connection.WAIT_FOR_DISK = "PRAGMA synchronous = OFF"  # as `PostgresServer` does


@pytest.fixture
def waits_for_disk(monkeypatch):
    """Has SQLite wait for the disk, as it does outside of tests."""
    monkeypatch.setattr(sqlite_connection, "WAIT_FOR_DISK", WAIT_FOR_DISK)


@pytest.fixture(scope="session")
def postgres_server():
    """A PostgreSQL for all tests that leave it alone; what kills or stops one makes its own."""
    with servers.PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def zookeeper_server():
    """A ZooKeeper for all tests that leave it alone."""
    with servers.ZooKeeperServer() as server:
        yield server


@pytest.fixture
def zookeeper_url(zookeeper_server):
    """A URL with a path that no other test uses."""
    return f"zookeeper://{zookeeper_server.address}/test-{next(_databases)}"


@pytest.fixture(scope="session")
def redis_server():
    """A Redis for all tests that leave it alone; what kills or stops one makes its own."""
    with servers.RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def rabbit_server():
    """A RabbitMQ for all tests that leave it alone; what kills or stops one makes its own."""
    with broker_servers.RabbitServer() as server:
        yield server


@pytest.fixture(scope="session")
def kafka_server():
    """A Kafka for all tests that leave it alone; what kills or stops one makes its own."""
    with broker_servers.KafkaServer() as server:
        yield server


_databases = itertools.count(1)


@pytest.fixture(scope="session")
def postgres_admin(postgres_server):
    """A connection to make and drop databases by: psql takes longer to start than either does."""
    import psycopg

    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def postgres_url(postgres_server, postgres_admin):
    """A fresh database."""
    name = f"test_{next(_databases)}"
    postgres_admin.execute(f"CREATE DATABASE {name} STRATEGY file_copy")  # a fifth of the time
    yield postgres_server.url_for(name)
    postgres_admin.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def redis_url(redis_server):
    """An empty database."""
    redis_server.execute("FLUSHALL")
    yield redis_server.url
    redis_server.execute("FLUSHALL")

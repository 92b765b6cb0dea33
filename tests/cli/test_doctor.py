"""doctor: each thing that keeps a node from working is found, and has its remedy."""

import asyncio
import os
import sqlite3
import subprocess
import sys
import zoneinfo
from datetime import timedelta

import pytest

from servers import PgBouncerServer
from tickwheel import ManualClock
from tickwheel.cli import host_checks
from tickwheel.cli.doctor import store_finding
from tickwheel.cli.host_checks import check_authorities, check_pair, duration
from tickwheel.durable import Scheduler
from tickwheel.durable.permits import descriptors
from tickwheel.durable.store import SHARED_SESSION
from tickwheel.errors import StoreUnavailable

KEY = "0123456789abcdef"


@pytest.fixture
def store(tmp_path):
    return f"sqlite:///{tmp_path}/tasks.db"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tasks.db"


@pytest.fixture
def findings(run):
    """Run the command, and return the exit code and the findings that are not "ok", by check."""

    def findings(*words):
        ran = run("doctor", "--max-connections", "10", "--max-calls", "10", *words)
        assert all(line["remedy"] for line in ran.lines if line["level"] != "ok")
        return ran.code, {
            line["check"]: (line["level"], line["finding"])
            for line in ran.lines
            if line["level"] != "ok"
        }

    return findings


def fill(url, work, **options):
    """Do something with a scheduler on the store, and stop it."""

    async def main():
        app = Scheduler(url, dispatch=False, allow_private_targets=True, **options)
        async with app:
            await work(app)

    asyncio.run(main())


async def nothing(_): ...


def test_a_sound_store_has_no_findings(findings, run, store):
    fill(store, nothing)
    assert findings("--store", store) == (0, {})
    checks = [line["check"] for line in run("doctor", "--store", store).lines]
    assert checks == [
        "schema", "store", "clock", "time zones", "tokens", "secret key", "nodes", "functions",
        "services", "file descriptors", "file modes", "TLS",
    ]  # fmt: skip
    shown = run("doctor", "--store", store, "--table").out
    assert "the tables have version" in shown


def test_a_missing_store_is_not_created(findings, store, path):
    code, found = findings("--store", store)
    assert (code, found.keys()) == (1, {"schema"})
    assert not path.exists()


@pytest.mark.parametrize(("version", "words"), [(1, "needs"), (99, "knows")])
def test_tables_of_another_version_stay_as_they_are(findings, store, path, version, words):
    fill(store, nothing)
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    code, found = findings("--store", store)
    assert code == 1
    assert f"have version {version}, and this program {words}" in found["schema"][1]
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (version,)
    connection.close()


def test_tasks_of_a_function_that_no_node_has(findings, store):
    async def submit(app):
        await app.submit("expire", "o-1", delay=60)

    fill(store, submit)
    code, found = findings("--store", store)
    assert code == 1
    assert found["functions"][0] == "error"
    assert found["functions"][1] == (
        "there are tasks of 'expire', which is neither a service nor a function of a known node"
    )
    assert found["nodes"] == ("warning", "no process dispatches")


def test_a_function_of_a_running_node_is_known_until_it_is_killed(findings, store):
    code = (
        "import asyncio, sys; from tickwheel.durable import Scheduler\n"
        "app = Scheduler(sys.argv[1], node='shop')\n"
        "app.task(name='expire')(print)\n"
        "async def main():\n"
        "    async with app:\n"
        "        await app.submit('expire', 'o-1', delay=3600)\n"
        "        while not any(one.functions for one in await app.nodes()):\n"
        "            await asyncio.sleep(0.01)\n"
        "        print(flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())"
    )
    shop = subprocess.Popen([sys.executable, "-c", code, store], stdout=subprocess.PIPE)
    try:
        assert shop.stdout.readline() == b"\n"
        assert findings("--store", store) == (0, {})
    finally:
        shop.kill()
        shop.communicate()
    code, found = findings("--store", store)
    assert (code, found.keys()) == (1, {"functions", "nodes"})
    assert found["nodes"][1] == "no process dispatches; the last was shop"


def with_functions(b):
    """Wait until a node is there with its functions and shards, and return its scheduler."""
    while not any(one.functions and one.shards for one in b.nodes()):
        pass
    return b


def test_on_sqlite_processes_that_stand_by_may_have_a_function(findings, store):
    owner = Scheduler(store, dispatch=["mail"])
    other = Scheduler(store, dispatch=["report"])
    for app in (owner, other):
        for name in ("mail", "report"):
            app.task(name=name)(print)
    with owner.blocking() as b, other.blocking():
        with_functions(b).submit("mail", [1], delay=3600)
        b.submit("report", [1], delay=3600)
        code, found = findings("--store", store)
    assert (code, found.keys()) == (0, {"functions"})
    assert found["functions"][0] == "warning"
    assert "tasks of 'report'" in found["functions"][1]
    assert "processes that stand by are not known" in found["functions"][1]
    code, found = findings("--store", store)  # nobody stands by
    assert (code, found["functions"][0]) == (1, "error")


def test_a_function_whose_tasks_are_late(findings, store):
    async def submit(app):
        await app.submit("report", [1], delay=0)

    fill(store, submit, clock=ManualClock(1_700_000_000))
    app = Scheduler(store)
    app.task(name="report", enabled=False)(print)
    app.task(name="mail", enabled=False)(print)
    with app.blocking() as b:
        with_functions(b).submit("mail", [1], delay=3600)
        code, found = findings("--store", store)
    assert (code, found.keys()) == (0, {"services"})
    assert found["services"][0] == "warning"
    assert found["services"][1].startswith("a task of report has been due for ")


def test_services_that_are_disabled_or_late(run, store):
    async def submit(app):
        for name, enabled in (("mail", False), ("sms", True)):
            endpoint = "http://127.0.0.1:9/hook"
            await app.put_service(name, endpoint=endpoint, enabled=enabled)
            await app.submit(name, {}, delay=0)

    fill(store, submit, clock=ManualClock(1_700_000_000))
    lines = run("doctor", "--store", store, "--allow-private-targets").lines
    mail, sms = (line["finding"] for line in lines if line["check"] == "services")
    assert mail == "mail is disabled, and has tasks"
    assert sms.startswith("a task of sms has been due for ")


def test_secrets_that_are_plain_or_sealed_with_another_key(findings, store, monkeypatch):
    def put(name, key):
        async def put(app):
            await app.put_service(name, endpoint="http://127.0.0.1:9/", secret="whsec_" + "a" * 32)

        fill(store, put, secret_key=key)

    put("plain", None)
    code, found = findings("--store", store)
    assert (code, found["secret key"][0]) == (0, "warning")
    assert "plain text in the store: of plain" in found["secret key"][1]
    put("plain", KEY)
    code, found = findings("--store", store)
    assert (code, found["secret key"][0]) == (1, "error")
    assert "TICKWHEEL_SECRET_KEY is not set in this environment" in found["secret key"][1]
    monkeypatch.setenv("TICKWHEEL_SECRET_KEY", KEY)
    assert findings("--store", store, "--allow-private-targets") == (0, {})
    monkeypatch.setenv("TICKWHEEL_SECRET_KEY", "x" * 16)
    code, found = findings("--store", store)
    assert (code, found["secret key"][0]) == (1, "error")
    assert "TICKWHEEL_SECRET_KEY does not have" in found["secret key"][1]


def test_tokens_that_are_missing_or_end_soon(findings, run, store):
    fill(store, nothing)
    everywhere = ("--store", store, "--listen", "0.0.0.0:7380")
    code, found = findings(*everywhere)
    assert (code, found["tokens"]) == (1, ("error", "there is no valid token"))
    assert found["TLS"][0] == "warning"
    assert findings(*everywhere, "--insecure-without-tokens")[1]["tokens"][0] == "error"
    run("tokens", "create", "ci", "--expires", "2d", "--store", store)
    code, found = findings(*everywhere)
    assert (code, found["tokens"][0]) == (0, "warning")
    assert "the token 'ci'" in found["tokens"][1]


def test_services_that_cannot_be_called_with_these_settings(run, findings, store, monkeypatch):
    from tickwheel.durable.implementations import BROKERS

    async def put(app):
        await app.put_service("close", endpoint="http://127.0.0.1:9/hook")
        await app.put_service("public", endpoint="http://192.0.9.1/hook")
        await app.put_service("ship", endpoint="redis://127.0.0.1:9/?stream=s", protocol="redis")

    fill(store, put)
    monkeypatch.setitem(BROKERS, "redis", ("redis_that_is_missing", "RedisStreams"))
    close, ship = (
        line for line in run("doctor", "--store", store).lines if line["check"] == "services"
    )
    assert "close cannot be called from here: 127.0.0.1 must not be called" in close["finding"]
    assert close["level"] == ship["level"] == "warning"
    assert "--allow-target" in close["remedy"]
    assert ship["remedy"] == "pip install 'tickwheel[redis]'"
    code, found = findings("--store", store, "--allow-target", "127.0.0.0/8")
    assert (code, found.keys()) == (0, {"services"})
    assert "ship cannot be called" in found["services"][1]
    assert findings("--store", store, "--submit-only") == (0, {})


def test_more_services_than_fit_are_counted(run, store):
    async def put(app):
        for number in range(12):
            await app.put_service(f"s{number}", endpoint="http://127.0.0.1:9/")

    fill(store, put)
    lines = [one for one in run("doctor", "--store", store).lines if one["check"] == "services"]
    assert len(lines) == 11
    assert lines[-1]["finding"] == "and 2 more services"


def test_the_group_of_the_service_may_read_a_key(tmp_path, monkeypatch):
    key = tmp_path / "key.pem"
    key.write_text("")
    key.chmod(0o640)
    assert not host_checks.others_read(key)
    monkeypatch.setattr(os, "getegid", lambda: key.stat().st_gid + 1)
    monkeypatch.setattr(os, "getgroups", list)
    assert host_checks.others_read(key)
    key.chmod(0o604)
    assert host_checks.others_read(key)
    key.chmod(0o600)
    assert not host_checks.others_read(key)


def test_files_that_others_can_read(findings, store, path, tmp_path):
    fill(store, nothing)
    path.chmod(0o644)
    code, found = findings("--store", store)
    assert (code, found["file modes"]) == (
        0,
        ("warning", f"other users of this host can read {path}"),
    )
    path.chmod(0o600)
    secrets = tmp_path / "production.toml"
    secrets.write_text('store = "postgresql://me:hunter2@127.0.0.1:1/x"')
    secrets.chmod(0o644)
    code, found = findings("--config", str(secrets))
    assert "production.toml" in found["file modes"][1]
    assert "hunter2" not in str(found)


def test_a_certificate_that_cannot_be_used_or_ends_soon(findings, store, tmp_path, certificate_for):
    fill(store, nothing)
    for days, level in ((300, None), (10, "warning"), (-1, "error")):
        certificate, key = certificate_for(timedelta(days=days))
        code, found = findings("--store", store, "--tls-cert", certificate, "--tls-key", key)
        assert found.get("TLS", (None,))[0] == level
        assert code == (level == "error")
    other, _ = certificate_for(timedelta(days=300))
    _, key = certificate_for(timedelta(days=300))
    assert findings("--store", store, "--tls-cert", other, "--tls-key", key)[0] == 1
    assert check_pair(*certificate_for(timedelta(days=300))).level == "ok"


def test_the_certificates_and_authorities_of_grpc(findings, store, tmp_path, certificate_for):
    fill(store, nothing)
    good, key = certificate_for(timedelta(days=300))
    for days, level in ((300, None), (10, "warning"), (-1, "error")):
        own = certificate_for(timedelta(days=days))
        _, found = findings("--store", store, "--grpc-cert", own[0], "--grpc-key", own[1])
        assert found.get("TLS", (None,))[0] == level
        _, found = findings("--store", store, "--grpc-ca", own[0])
        assert found.get("TLS", (None,))[0] == level
        clients = ["--grpc-listen", "127.0.0.1:0", "--grpc-client-ca", own[0]]
        _, found = findings("--store", store, "--tls-cert", good, "--tls-key", key, *clients)
        assert found.get("TLS", (None,))[0] == level
    assert findings("--store", store, "--grpc-cert", own[0], "--grpc-key", key)[0] == 1
    assert findings("--store", store, "--grpc-ca", key)[0] == 1
    assert findings("--store", store, "--grpc-ca", tmp_path / "nothing.pem")[0] == 1
    _, found = findings("--store", store, "--grpc-listen", "192.0.2.1:50051")
    assert found["TLS"] == (
        "warning",
        "tokens and payloads travel in plain text to 192.0.2.1:50051",
    )


def test_a_chain_ends_with_its_first_and_authorities_with_their_last(tmp_path, certificate_for):
    short, _ = certificate_for(timedelta(days=10))
    long, long_key = certificate_for(timedelta(days=300))
    both = tmp_path / "both.pem"
    both.write_bytes(long.read_bytes() + short.read_bytes())
    assert check_pair(both, long_key).level == "warning"
    assert check_authorities(both).level == "ok"


def test_without_cryptography_the_end_of_a_certificate_is_unknown(
    findings, store, monkeypatch, certificate_for
):
    fill(store, nothing)
    certificate, key = certificate_for(timedelta(days=-1))
    monkeypatch.setitem(sys.modules, "cryptography", None)
    code, found = findings("--store", store, "--tls-cert", certificate, "--tls-key", key)
    assert (code, found["TLS"][0]) == (0, "warning")
    assert f"it is unknown when the certificates in {certificate} end" in found["TLS"][1]


@pytest.fixture
def certificate_for(tmp_path):
    """Make a certificate that ends then, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    from tickwheel.clock import WallClock

    made = iter(range(100))

    def make(left):
        from datetime import UTC, datetime

        number, now = next(made), datetime.fromtimestamp(WallClock().time(), UTC)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
        built = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(number + 1)
            .not_valid_before(now - timedelta(days=400))
            .not_valid_after(now + left)
            .sign(key, hashes.SHA256())
        )
        files = tmp_path / f"{number}.pem", tmp_path / f"{number}.key"
        files[0].write_bytes(built.public_bytes(serialization.Encoding.PEM))
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        files[1].chmod(0o600)
        return files

    return make


def test_too_few_file_descriptors(run, store, monkeypatch):
    fill(store, nothing)
    monkeypatch.setattr(host_checks, "hard_limit", lambda: 100)
    [line] = [one for one in run("doctor", "--store", store).lines if one["level"] != "ok"]
    assert line["check"] == "file descriptors"
    assert "60 connections and 20 calls" in line["finding"]
    assert descriptors.hard_limit() > 0


def test_file_descriptors_for_calls_are_needed_once_there_is_a_service(
    findings, store, monkeypatch
):
    async def put(app):
        await app.put_service("mail", endpoint="http://127.0.0.1:9/hook")

    monkeypatch.setattr(host_checks, "hard_limit", lambda: 100)
    calls = ("--max-calls", "100", "--store", store)
    assert findings(*calls)[1].keys() == {"schema", "file descriptors"}
    fill(store, nothing)
    assert findings(*calls) == (0, {})
    fill(store, put)
    assert findings(*calls, "--allow-private-targets")[1].keys() == {"file descriptors"}


def test_a_task_that_is_late_by_less_than_a_minute_is_not_denied(run, store):
    fill(store, nothing)
    [line] = [one for one in run("doctor", "--store", store).lines if one["check"] == "services"]
    assert "no task is late by more than a minute" in line["finding"]


def test_a_time_zone_that_this_host_does_not_know(findings, store, monkeypatch):
    async def put(app):
        await app.put_schedule("nightly", "report", {}, cron="0 3 * * *", tz="Asia/Tokyo")

    fill(store, put)
    assert "time zones" not in findings("--store", store)[1]
    real = zoneinfo.ZoneInfo

    def unknown(name):
        if name == "Asia/Tokyo":
            raise zoneinfo.ZoneInfoNotFoundError(name)
        return real(name)

    monkeypatch.setattr(host_checks.zoneinfo, "ZoneInfo", unknown)
    code, found = findings("--store", store)
    assert (code, found["time zones"]) == (1, ("error", "this host does not know Asia/Tokyo"))


def test_a_database_that_does_not_answer(findings):
    code, found = findings("--store", "postgresql://me:hunter2@127.0.0.1:1/x")
    assert (code, found["store"][0]) == (1, "error")
    assert "hunter2" not in str(found)


def test_a_name_with_pooler_is_no_pooler(findings):
    code, found = findings("--store", "postgresql://me@127.0.0.1:1/pooler")
    assert (code, found.keys()) == (1, {"store"})
    assert "pooler" in found["store"][1]
    assert store_finding(StoreUnavailable(f"PostgreSQL: {SHARED_SESSION}")).check == "pooler"


def test_a_zookeeper_that_does_not_answer_hides_no_other_finding(
    run, findings, postgres_url, monkeypatch
):
    from tickwheel.durable.coordinators import zookeeper

    monkeypatch.setattr(zookeeper, "CONNECT_SECONDS", 0.1)  # nothing listens there
    fill(postgres_url, nothing)
    words = ("--store", postgres_url, "--coordinator", "zookeeper://127.0.0.1:1/x")
    code, found = findings(*words)
    assert (code, found.keys()) == (1, {"coordinator"})
    assert "ZooKeeper at 127.0.0.1:1 does not answer" in found["coordinator"][1]
    checks = {line["check"] for line in run("doctor", *words).lines}
    assert checks >= {"schema", "store", "clock", "pooler", "tokens", "secret key", "services"}
    assert not checks & {"nodes", "functions"}


def test_nodes_of_a_coordinator_that_is_not_named(run, findings, postgres_url, zookeeper_url):
    app = Scheduler(postgres_url, coordinator=zookeeper_url)
    app.task(name="mail")(print)
    with app.blocking() as b:
        with_functions(b).submit("mail", [1], delay=3600)
        assert findings("--store", postgres_url, "--coordinator", zookeeper_url) == (0, {})
        lines = {line["check"]: line for line in run("doctor", "--store", postgres_url).lines}
    assert lines["nodes"]["finding"].startswith("no process dispatches; the last was ")
    assert "if one runs, name its --coordinator" in lines["nodes"]["remedy"]
    assert lines["functions"]["level"] == "error"
    assert "if one runs, name its --coordinator" in lines["functions"]["remedy"]


def test_postgresql_directly_and_through_a_pooler(run, findings, postgres_server, postgres_url):
    fill(postgres_url, nothing)
    assert findings("--store", postgres_url) == (0, {})
    for mode in ("session", "transaction"):
        server = PgBouncerServer(postgres_server, options={"pool_mode": mode}).start()
        try:
            ran = run("doctor", "--store", server.url_for(postgres_url.rpartition("/")[2]))
        finally:
            server.close()
        [pooler] = [line for line in ran.lines if line["check"] == "pooler"]
        assert pooler["level"] == ("ok" if mode == "session" else "error")
        assert ran.code == (mode == "transaction")


def test_the_clock_of_the_database_is_compared(run, findings, postgres_url, monkeypatch):
    fill(postgres_url, nothing)
    from tickwheel.durable.stores.postgres.store import PostgresStore

    monkeypatch.setattr(PostgresStore, "offset_ms", property(lambda _: -125_000.0))
    code, found = findings("--store", postgres_url)
    assert (code, found["clock"][0]) == (0, "warning")
    assert "is 2 minutes behind this host's" in found["clock"][1]


@pytest.mark.parametrize(
    ("ms", "shown"), [(0, "0 s"), (1_234, "1.23 s"), (200_000, "3 minutes"), (9e9, "104 days")]
)
def test_a_duration_is_short(ms, shown):
    assert duration(ms) == shown

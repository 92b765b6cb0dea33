"""Tokens and migrations, on a store of their own."""

import asyncio
import hashlib
import re
import sqlite3

import psycopg
import pytest

import servers
from tickwheel.cli import store as store_commands
from tickwheel.cli.store import NAMESPACE, SCOPES, make_token, token_document
from tickwheel.durable.implementations import store_at
from tickwheel.durable.stores.postgres import migration as postgres_migration
from tickwheel.durable.stores.postgres import schema as postgres_schema
from tickwheel.durable.stores.postgres import session as postgres_session
from tickwheel.web import access


@pytest.fixture(params=["sqlite", "postgres"])
def store(request, tmp_path):
    if request.param == "postgres":
        return request.getfixturevalue("postgres_url")
    return f"sqlite:///{tmp_path}/tasks.db"


def read_registry(url, read):
    async def open_and_read():
        store = store_at(url, shards=64)
        await store.open()
        try:
            return await read(store.registry)
        finally:
            await store.close()

    return asyncio.run(open_and_read())


def test_a_token_is_shown_once_and_only_its_digest_is_stored(run, store):
    ran = run("tokens", "create", "ci", "--scope", "admin", "--store", store)
    assert ran.code == 0
    text = ran.json["token"]
    match = re.fullmatch(r"tw_([0-9a-f]{12})_([A-Za-z0-9_-]{43})", text)
    [token] = read_registry(store, lambda registry: registry.tokens())
    assert token.id == match[1] == ran.json["id"]
    assert token.digest == hashlib.sha256(match[2].encode()).hexdigest()
    assert token.scopes == ("admin",)
    assert match[2] not in run("tokens", "list", "--store", store).out
    assert match[2] not in repr(token)


def test_the_server_accepts_the_token():
    made = make_token("ci", namespace="shop", scopes=("read",), rate=None, now_ms=5, lifetime=1.0)
    token_id, secret = access.TOKEN.fullmatch(made.text).groups()
    assert made.token.id == token_id
    assert made.token.digest == access.digest_of(secret)
    assert made.token.expires_at_ms == 1005
    assert NAMESPACE.pattern == access.NAMESPACE.pattern
    assert SCOPES == access.SCOPES


def test_a_token_has_the_given_options(run, store):
    words = ["--scope", "read", "--scope", "submit", "--namespace", "shop", "--rate", "5"]
    run("tokens", "create", "orders", *words, "--expires", "90d", "--store", store)
    [token] = run("tokens", "list", "--store", store).lines
    assert token["scopes"] == ["submit", "read"]
    assert (token["namespace"], token["rate"], token["name"]) == ("shop", 5.0, "orders")
    assert token["expires_at"] > token["created_at"]


@pytest.mark.parametrize("span", ["0", "500ms", "100000000d", "1e300"])
def test_a_token_lives_from_a_second_to_a_century(run, store, span):
    ran = run("tokens", "create", "odd", "--expires", span, "--store", store)
    assert ran.code == 2
    assert "must be from 1s to 36500d" in ran.err
    assert run("tokens", "create", "odd", "--expires", "36500d", "--store", store).code == 0


def test_an_expiry_after_the_year_9999_can_be_shown():
    made = make_token(
        "odd", namespace="", scopes=("read",), rate=None, now_ms=1, lifetime=8_640_000_000_000.0
    )
    assert token_document(made.token)["expires_at"] == "9999-12-31T23:59:59.000Z"


def test_by_default_a_token_may_submit_and_read_in_the_default_namespace(run, store):
    made = run("tokens", "create", "plain", "--store", store).json
    assert made["scopes"] == ["submit", "read"]
    assert made["namespace"] == "default"
    assert made["expires_at"] is None


def test_quiet_prints_the_token_alone(run, store):
    ran = run("tokens", "create", "ci", "-q", "--store", store)
    assert re.fullmatch(r"tw_\S+\n", ran.out)


def test_create_says_to_store_the_token(run, store):
    ran = run("tokens", "create", "ci", "--table", "--store", store)
    assert re.search(r"^tw_\S+$", ran.out, re.MULTILINE)
    assert "will not be shown again" in ran.out


def test_a_second_revoke_does_not_find_the_token(run, store):
    token = run("tokens", "create", "ci", "--store", store).json
    assert run("tokens", "revoke", token["id"], "--store", store).json == {"revoked": token["id"]}
    assert run("tokens", "list", "--store", store).out == ""
    assert "namespace" in run("tokens", "list", "--store", store, "--table").out
    ran = run("tokens", "revoke", token["id"], "--store", store)
    assert ran.code == 3
    assert "(unknown_token)" in ran.err


def test_revoke_takes_the_whole_token_and_shows_nothing_of_its_secret(run, store):
    token = run("tokens", "create", "ci", "--store", store).json
    run("tokens", "revoke", token["token"], "--store", store)
    ran = run("tokens", "revoke", token["token"], "--store", store)
    assert ran.code == 3
    assert token["token"].split("_", 2)[2] not in ran.err


def test_list_and_revoke_do_not_create_a_store(run, store, tmp_path):
    for words in (["list"], ["revoke", "3f9a0c1b2d4e"]):
        ran = run("tokens", *words, "--store", store)
        assert ran.code == 2
        assert "does not exist" in ran.err
    assert not list(tmp_path.glob("*.db"))
    assert run("migrate", "--store", store).json["before"] == 0


def test_the_first_token_says_that_its_store_is_new(run, store):
    first = run("tokens", "create", "one", "-q", "--store", store)
    assert first.code == 0
    assert first.err.startswith("note: ")
    assert "creating " in first.err
    assert run("tokens", "create", "two", "-q", "--store", store).err == ""


def test_creating_and_revoking_tokens_is_in_the_audit_log(run, store):
    token = run("tokens", "create", "ci", "--rate", "5", "--store", store).json
    run("tokens", "revoke", token["id"], "--store", store)
    read = lambda registry: registry.audit(namespace=None, cursor=None, limit=10)  # noqa: E731
    lines, _ = read_registry(store, read)
    assert [(line.action, line.target, line.actor) for line in lines] == [
        ("token.revoke", token["id"], "local"),
        ("token.create", token["id"], "local"),
    ]
    revoked, created = lines
    for words in ('name: none -> "ci"', 'scopes: none -> ["submit", "read"]', "rate: none -> 5.0"):
        assert words in created.detail
    assert 'name: "ci" -> none' in revoked.detail
    assert token["token"] not in repr(lines)


def test_the_store_is_the_one_that_serve_would_use(run, store, monkeypatch, tmp_path):
    (tmp_path / "tickwheel.toml").write_text(f'store = "{store}"')
    run("tokens", "create", "file")
    monkeypatch.setenv("TICKWHEEL_STORE", store)
    run("tokens", "create", "variable")
    assert [t["name"] for t in run("tokens", "list", "--store", store).lines] == [
        "file",
        "variable",
    ]


def test_migrate_prints_the_version_before_and_after(run, store):
    first = run("migrate", "--store", store).json
    assert first["before"] == 0
    assert first["after"] >= 2
    again = run("migrate", "--store", store).json
    assert again["before"] == again["after"] == first["after"]
    assert "already" in run("migrate", "--store", store, "--table").out


def test_migrate_waits_for_other_transactions_without_a_limit_and_names_them(
    run, postgres_url, monkeypatch
):
    run("migrate", "--store", postgres_url)
    for name in ("PATIENCE_SECONDS", "REPORT_AFTER_SECONDS", "REPORT_AGAIN_SECONDS"):
        monkeypatch.setattr(postgres_migration, name, 0.01)
    version = len(postgres_schema.MIGRATIONS)
    monkeypatch.setattr(postgres_schema, "MIGRATIONS", [*postgres_schema.MIGRATIONS, []])
    lines = []
    with psycopg.connect(postgres_url) as user:
        user.execute("LOCK TABLE setting IN SHARE MODE")

        def print_message(line, **_):
            lines.append(line)
            if len(lines) == 3:  # a node would have given up at the first
                user.commit()

        monkeypatch.setattr(store_commands, "print_message", print_message)
        ran = run("migrate", "--store", postgres_url)
        assert f"waits for session {user.info.backend_pid} (" in lines[0]
    assert (ran.code, ran.json) == (0, {"before": version, "after": version + 1})


def test_migrate_names_a_pooler_that_shares_connections(
    run, postgres_url, postgres_server, monkeypatch
):
    monkeypatch.setattr(postgres_session, "NOTIFY_SECONDS", 1.0)
    options = {"pool_mode": "transaction"}
    with servers.PgBouncerServer(postgres_server, options=options) as pooler:
        url = pooler.url_for(postgres_url.rpartition("/")[2])
        ran = run("migrate", "--store", url)
    assert ran.code == 2
    assert "PgBouncer" in ran.err


@pytest.mark.parametrize("url", ["postgresql://h/d?schema=A", "postgresql://h/d?search_path=a"])
def test_an_invalid_schema_name_is_refused_in_one_line(run, url):
    ran = run("migrate", "--store", url)
    assert ran.code == 2
    assert "?schema=" in ran.err or "the schema of a store's URL" in ran.err
    assert ran.err.count("\n") == 1


def test_a_store_that_cannot_be_opened_is_unavailable(run, tmp_path):
    (tmp_path / "file").write_text("")
    ran = run("migrate", "--store", f"sqlite:///{tmp_path}/file/tasks.db")
    assert ran.code == 7
    assert "(store_unavailable)" in ran.err


@pytest.mark.parametrize("command", [["migrate"], ["tokens", "list"], ["tokens", "create", "x"]])
def test_a_file_of_another_program_is_refused_in_one_line(run, tmp_path, command):
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE users (name TEXT)")
    connection.close()
    before = path.read_bytes()
    ran = run(*command, "--store", f"sqlite:///{path}")
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "another program's: it has other tables (users)" in ran.err
    assert path.read_bytes() == before

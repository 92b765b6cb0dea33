"""The pages on durable tasks agree with the code: names, tables, tests."""

import ast
import asyncio
import dataclasses
import inspect
import re
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import get_overloads

import asyncpg
import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, orm
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import tickwheel.durable
from tickwheel import ManualClock
from tickwheel.durable import Blocking, Scheduler, TaskFunction
from tickwheel.durable.scheduler import TASK_OPTIONS
from tickwheel.durable.stores.postgres import schema as postgres_schema
from tickwheel.durable.stores.sqlite import schema as sqlite_schema
from tickwheel.errors import TickwheelError
from tickwheel.values.options import OPTIONS
from tickwheel.values.service import Service
from tickwheel.values.task import FAILURE_EVENTS, FINAL, TRANSITIONS, State

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
REFERENCE = (DOCS / "reference" / "durable.md").read_text("utf-8")
GUARANTEES = (DOCS / "guarantees.md").read_text("utf-8")
CODE = re.compile(r"^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [path for path in DOCS.rglob("*.md") if CODE.search(path.read_text("utf-8"))]


def rows(text, heading):
    """Return the cells of the first table after `heading`, without their backticks."""
    lines = iter(text[text.index(heading) :].splitlines())
    table = []
    for line in lines:
        if line.startswith("|"):
            table.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
        elif table:
            break
    return table[2:]


def documented(prefix):
    return set(re.findall(rf":: tickwheel\.durable\.{prefix}(\w+)", REFERENCE))


def test_every_verb_is_in_the_reference_and_blocking_has_it():
    verbs = {
        name
        for name, verb in inspect.getmembers(Scheduler, inspect.isfunction)
        if not name.startswith("_")
    }
    assert documented(r"Scheduler\.") == verbs
    plain = {"task", "around", "blocking", "run", "rebind"}
    assert verbs - plain <= set(dir(Blocking))


def test_the_options_of_a_submit_are_all_in_its_table():
    table = rows(REFERENCE, "| option of `submit`")
    assert {row[0] for row in table} == OPTIONS


def test_the_options_of_a_scheduler_and_their_defaults_are_in_its_table():
    listed = {row[0]: row[1].strip("`") for row in rows(REFERENCE, "| option | default |")}
    actual = dict(inspect.signature(Scheduler).parameters)
    del actual["url"]
    assert set(listed) == set(actual)
    for name in set(actual) - {"coordinator", "retention"}:
        assert ast.literal_eval(listed[name]) == actual[name].default, name
    assert listed["retention"] == f"{actual['retention'].default.days} days"


def test_the_options_of_a_task_function_have_the_defaults_that_are_shown():
    shown = re.search(r"py:method:: \S+\.task\(function=None, \*, (.*)\)\n", REFERENCE)
    assert shown
    listed = {
        name: ast.literal_eval(value) for name, value in re.findall(r"(\w+)=([^,]+)", shown[1])
    }
    kept = {field.name: field.default for field in dataclasses.fields(Service)}
    assert tuple(listed) == TASK_OPTIONS
    assert listed.pop("name") is listed.pop("backoff") is None
    assert listed == {name: kept[name] for name in listed}


def test_a_type_checker_knows_as_many_arguments_before_options_as_the_reference_says():
    overloads = map(inspect.signature, get_overloads(TaskFunction.submit))
    counts = [
        sum(one.kind is one.POSITIONAL_ONLY for one in known.parameters.values()) - 1
        for known in overloads
    ]
    assert max(counts) == 6
    assert "after up to six positional arguments" in REFERENCE


def test_the_fields_in_the_reference_exist():
    for name, fields in rows(REFERENCE, "| | fields |"):
        for field in re.findall(r"`?(\w+)`", fields + "`"):
            assert hasattr(getattr(tickwheel.durable, name), field), (name, field)


def test_the_table_of_transitions_is_that_of_the_code():
    listed = {(a, event): (b, counts) for a, event, b, counts, _ in rows(REFERENCE, "<!-- trans")}
    assert listed == {
        (str(a), str(event)): (str(b), "yes" if event in FAILURE_EVENTS else "")
        for (a, event), b in TRANSITIONS.items()
    }


def test_the_table_of_states_is_that_of_the_code():
    listed = {name: text.startswith("final") for name, text in rows(REFERENCE, "| state |")}
    assert listed == {str(state): state in FINAL for state in State}


def test_the_table_of_errors_is_that_of_the_code():
    listed = {tuple(row[:3]) for row in rows(REFERENCE, "<!-- errors -->")}
    errors = [
        error
        for name in tickwheel.durable.__all__
        if isinstance(error := getattr(tickwheel.durable, name), type)
        and issubclass(error, TickwheelError)
    ]
    assert listed == {
        (error.__name__, error.__bases__[-1].__name__, error.code) for error in errors
    }


def test_the_tables_in_the_reference_are_those_of_the_schemas():
    listed = {row[0] for row in rows(REFERENCE, "<!-- tables -->")}
    for schema, more in ((sqlite_schema, {"node", "accepted"}), (postgres_schema, set())):
        statements = " ".join(chain.from_iterable(schema.MIGRATIONS))
        assert set(re.findall(r"CREATE TABLE (\w+)", statements)) | more == listed


def test_the_keys_of_stats_are_in_the_reference(tmp_path):
    listed = set(
        re.findall(r"`(\w+)`", " ".join(f"`{row[0]}`" for row in rows(REFERENCE, "`stats")))
    )
    with Scheduler(f"sqlite:///{tmp_path}/tasks.db").blocking() as b:
        assert set(b.stats()) <= listed


def test_every_test_that_the_guarantees_name_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", GUARANTEES)
    assert len(named) > 15
    for path, name in named:
        text = (ROOT / path).read_text("utf-8")
        assert not name or re.search(rf"def {name}\b", text), (path, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_that_is_shown_and_not_run_can_at_least_be_compiled(page):
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for code in CODE.findall(page.read_text("utf-8")):
        compile(code, str(page), "exec", flags)


def scheduler_of_orders(url):
    app = Scheduler(url)

    @app.task
    def expire(order_id):
        pass

    assert isinstance(expire, TaskFunction)
    return app, expire


class Base(orm.DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    state: orm.Mapped[str]


def orders_of(url):
    with psycopg.connect(url) as connection:
        orders = connection.execute("SELECT id FROM orders").fetchall()
        tasks = connection.execute("SELECT key FROM task").fetchall()
    return {row[0] for row in orders}, {row[0] for row in tasks}


def run_example(code, **names):
    """Run an example that awaits."""
    body = "".join(f"    {line}\n" for line in code.splitlines())
    exec(f"async def example():\n{body}", names)
    return asyncio.wait_for(names["example"](), 30)


def test_every_way_to_change_tasks_in_your_own_transaction(postgres_url):
    page = (DOCS / "how-to" / "durable-your-transaction.md").read_text("utf-8")
    asyncpgs, sqlalchemys, blocking, cancel = CODE.findall(page)
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id text PRIMARY KEY, state text)")

    async def asynchronous():
        app, expire = scheduler_of_orders(postgres_url)
        names = {"app": app, "expire": expire, "url": postgres_url, "asyncpg": asyncpg}
        await run_example(asyncpgs, **names)
        engine = create_async_engine(postgres_url.replace("postgresql:", "postgresql+asyncpg:"))
        names |= {"engine": engine, "AsyncSession": AsyncSession, "Order": Order}
        await run_example(sqlalchemys, **names)
        await engine.dispose()

    asyncio.run(asynchronous())
    app, expire = scheduler_of_orders(postgres_url)
    exec(blocking, {"app": app, "expire": expire, "url": postgres_url, "psycopg": psycopg})
    orders, tasks = orders_of(postgres_url)
    assert orders == {"o-1", "o-2", "o-3"}
    assert tasks == {"order:o-1", "order:o-2", "order:o-3"}

    async def cancelled():
        app, _ = scheduler_of_orders(postgres_url)
        connection = await asyncpg.connect(postgres_url)
        async with app, connection.transaction():
            await run_example(cancel, app=app, connection=connection)
        await connection.close()

    asyncio.run(cancelled())
    assert orders_of(postgres_url)[1] == {"order:o-2", "order:o-3"}


def test_a_submit_in_your_own_transaction_is_tested_without_sleeping(postgres_url):
    page = (DOCS / "how-to" / "durable-test-without-sleeping.md").read_text("utf-8")
    [code] = CODE.findall(page)

    async def example():
        app, expire = scheduler_of_orders("memory://")
        connection = await asyncpg.connect(postgres_url)
        names = {"app": app, "expire": expire, "url": postgres_url, "connection": connection}
        await run_example(code, **names, clock=ManualClock(1_800_000_000))
        await connection.close()

    asyncio.run(example())


def test_a_second_submit_with_the_same_idempotency_key_returns_the_first_task(tmp_path):
    page = (DOCS / "how-to" / "durable-retry.md").read_text("utf-8")
    [code] = CODE.findall(page)

    async def example():
        app, expire = scheduler_of_orders(f"sqlite:///{tmp_path}/tasks.db")
        async with app:
            await run_example(f"{code}assert again == task\n", expire=expire)
            assert len((await app.list()).items) == 1

    asyncio.run(example())


def test_the_script_of_a_deployment_puts_the_schedule_and_runs_no_task(tmp_path, monkeypatch):
    page = (DOCS / "how-to" / "durable-schedules.md").read_text("utf-8")
    code = CODE.findall(page)[0]
    monkeypatch.chdir(tmp_path)
    app, expire = scheduler_of_orders("sqlite:///tasks.db")
    monkeypatch.setitem(sys.modules, "shop", SimpleNamespace(app=app, expire=expire))
    exec(code, {})
    assert app.dispatch is False
    with Scheduler("sqlite:///tasks.db", dispatch=False).blocking() as b:
        assert [schedule.name for schedule in b.schedules()] == ["sweep"]


def test_alembic_leaves_the_tables_of_tickwheel_alone_with_the_filter_that_is_shown(postgres_url):
    page = (DOCS / "how-to" / "durable-processes.md").read_text("utf-8")
    [code] = CODE.findall(page)
    given = {}
    context = SimpleNamespace(configure=lambda _, **options: given.update(options))
    exec(code, {"context": context})
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA tickwheel")
    with Scheduler(f"{postgres_url}?schema=tickwheel").blocking():
        pass
    engine = create_engine(
        postgres_url.replace("postgresql:", "postgresql+psycopg:"),
        connect_args={"options": "-c search_path=public"},  # the role has the schema's name
    )
    with engine.connect() as connection:

        def changes(options):
            compared = MigrationContext.configure(connection, opts=options)
            return {change[0] for change in compare_metadata(compared, Base.metadata)}

        assert given.keys() == {"include_schemas", "include_name"}
        assert changes(given) == {"add_table"}
        assert "remove_table" in changes({"include_schemas": True})
    engine.dispose()

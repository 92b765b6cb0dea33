"""The scheduler of a Django project, made from its settings.

It knows no view and no command. A process that submits starts it on first use, and runs no tasks;
`manage.py tickwheel` runs them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections, connections, transaction

from tickwheel.durable.blocking import Blocking
from tickwheel.durable.scheduler import Scheduler
from tickwheel.values.store_url import MEMORY_URL, postgres_url, sqlite_url

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tickwheel.durable.function import TaskFunction
    from tickwheel.durable.verbs.arguments import Target
    from tickwheel.values.task import Task

FILE = "tickwheel.db"  # next to that of SQLite
POSTGRES_OPTIONS = {"sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile"}


class ProjectScheduler(Scheduler):
    """The scheduler of `settings.TICKWHEEL`.

    - "url" is its store. Without it, "database" names one of DATABASES, by default "default": on
      PostgreSQL the tasks are in that database, on SQLite in `tickwheel.db` next to it. The
      database of Django's test runner counts: on SQLite in memory the store is in memory, too.
    - The other settings are arguments of `Scheduler`.
    """

    def __init__(self, configured: Mapping[str, Any]) -> None:
        options = {"database": "default", **configured}
        self.database: str | None = options.pop("database")
        coordinator = None
        if "url" in options:
            self.database = None
        else:
            options["url"] = MEMORY_URL  # until the start
            coordinator = options.pop("coordinator", None)
        try:
            super().__init__(**options, dispatch=False)
        except (TypeError, ValueError) as error:
            raise ImproperlyConfigured(f"TICKWHEEL in the settings: {error}") from error
        if self.database is not None:
            self._binding = self._binding._replace(coordinator=coordinator)
        self._start_lock = threading.Lock()
        self._thread: Blocking | None = None
        self.around(with_fresh_connections)

    def rebind(self, url: str, **options: Any) -> None:
        """Use another store from the next start on, as `Scheduler.rebind`."""
        super().rebind(url, **options)
        self.database = None

    async def start(self) -> None:
        """Open the store and start; the database is looked up now, since tests change it."""
        if self.database is not None:
            binding = self._binding._replace(url=database_url(self.database))
            self._bind(binding._replace(dispatch=self.dispatch))
        await super().start()

    def started(self) -> Blocking:
        """Return the verbs, for views and other plain functions, in any thread.

        The first call in a process starts the scheduler, without running tasks.
        """
        if not self.running:
            with self._start_lock:
                if not self.running:
                    self._thread = Blocking(self).start()
                    atexit.register(self._stop_thread, self._thread)
        return Blocking(self)

    def _stop_thread(self, thread: Blocking) -> None:
        if self._thread is thread and self.running:
            thread.stop()

    def _submit_sync(
        self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Task[Any]:
        self.started()
        return super()._submit_sync(target, args, kwargs)

    def _after_fork_in_child(self) -> None:
        """Reset the state in the child of a fork, which starts a thread of its own."""
        super()._after_fork_in_child()
        self._start_lock, self._thread = threading.Lock(), None


@contextlib.contextmanager
def with_fresh_connections(_: Task[Any]) -> Iterator[None]:
    """Close a thread's broken or outdated connections around a plain function, as for a request."""
    if asyncio._get_running_loop() is not None:  # a coroutine function: it has no connection here
        yield
        return
    close_old_connections()
    try:
        yield
    finally:
        close_old_connections()


def database_url(alias: str) -> str:
    """Return the URL of the store that belongs to one of DATABASES."""
    if alias not in connections:
        raise ImproperlyConfigured(f"TICKWHEEL names a database {alias!r} that DATABASES lacks")
    connection = connections[alias]
    found = connection.settings_dict
    name = str(found["NAME"])
    if connection.vendor == "sqlite":
        if connection.is_in_memory_db():
            return MEMORY_URL
        return sqlite_url(Path(name).absolute().with_name(FILE))
    if connection.vendor != "postgresql" or not name:
        raise ImproperlyConfigured(
            f'TICKWHEEL needs a "url": DATABASES[{alias!r}] names no database on SQLite or'
            " PostgreSQL"
        )
    options = {key: value for key, value in found["OPTIONS"].items() if key in POSTGRES_OPTIONS}
    options |= {word: found[word.upper()] for word in ("host", "port") if found[word.upper()]}
    return postgres_url(name, found["USER"], found["PASSWORD"], options)


def submit_on_commit(
    function: TaskFunction[..., Any], *args: Any, using: str = "default", **kwargs: Any
) -> None:
    """Submit a task with the current transaction of Django's connection `using`.

    - If the tasks are in that database and it is PostgreSQL's, the task is part of the transaction.
    - Otherwise it is submitted after the commit, and lost if the process dies in between.
    - Arguments and options are those of `submit`.
    """
    connection = connections[using]
    if scheduler.database == using and connection.vendor == "postgresql":
        function.submit_sync(*args, connection=connection, **kwargs)
    else:
        transaction.on_commit(functools.partial(function.submit_sync, *args, **kwargs), using)


scheduler = ProjectScheduler(getattr(settings, "TICKWHEEL", {}))

"""The scheduler of a Django project, made from its settings.

It knows no view and no command. A process that submits starts it on first use, and runs no tasks;
`manage.py tickwheel` runs them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import sys
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
    from tickwheel.durable.scheduler import Binding
    from tickwheel.durable.verbs.arguments import Target
    from tickwheel.values.task import Task

FILE = "tickwheel.db"  # next to that of SQLite
POSTGRES_OPTIONS = {"sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile"}


class ProjectScheduler(Scheduler):
    """The scheduler of `settings.TICKWHEEL`.

    - "url" is its store. Without it, "database" names one of DATABASES, by default "default": on
      PostgreSQL the tasks are in that database, on SQLite in `tickwheel.db` next to it.
    - The other settings are arguments of `Scheduler`.
    - In Django's test environment the store is in memory, whatever the settings say. A test that
      needs another one calls `rebind`.
    """

    _thread: Blocking | None = None  # of `started`

    def __init__(self, configured: Mapping[str, Any]) -> None:
        options = {"database": "default", **configured}
        alias = options.pop("database")
        self._alias: str | None = None if "url" in options else alias
        coordinator = None
        if self._alias is not None:
            options["url"] = MEMORY_URL  # until the start
            coordinator = options.pop("coordinator", None)
        try:
            super().__init__(**options, dispatch=False)
        except (TypeError, ValueError) as error:
            raise ImproperlyConfigured(f"TICKWHEEL in the settings: {error}") from error
        if self._alias is not None:
            self._binding = self._binding._replace(coordinator=coordinator)
        self._configured = self._binding
        self._start_lock = threading.Lock()
        atexit.register(self._stop_thread)
        self.around(with_fresh_connections)

    @property
    def database(self) -> str | None:
        """The one of DATABASES that decides the store, if the settings do so."""
        return None if in_tests() or self._binding is not self._configured else self._alias

    def rebind(self, url: str, **options: Any) -> None:
        """Use another store from the next start on, as `Scheduler.rebind`."""
        self._stop_thread()
        super().rebind(url, **options)

    def _bind(self, binding: Binding) -> None:
        self._stop_thread()
        super()._bind(binding)

    async def start(self) -> None:
        """Open the store and start, in place of what `started` has started.

        The store is looked up now, since tests change it.
        """
        self._stop_thread()
        if self._binding is not self._configured:  # after `rebind`
            await super().start()
            return
        binding = self._configured._replace(dispatch=self.dispatch)
        if in_tests():
            binding = binding._replace(url=MEMORY_URL, coordinator=None)
        elif self._alias is not None:
            binding = binding._replace(url=database_url(self._alias))
        self._bind(binding)
        self._binding = self._configured
        await super().start()

    def started(self) -> Blocking:
        """Return the verbs, for views and other plain functions, in any thread.

        The first call in a process starts the scheduler, without running tasks; it runs until
        `started().stop()`, the end of the process, or another start.
        """
        with self._start_lock:
            if not self.running:
                self._thread = Blocking(self).start()
            return self._thread or Blocking(self)

    def _stop_thread(self) -> None:
        """Stop what `started` has started, if it still runs."""
        thread, self._thread = self._thread, None
        if thread is not None and self.running:
            thread.stop()

    def _user_connection(self, connection: Any) -> Any:
        if in_tests() and not self.node.store.joins_transactions:
            return None  # as with a ManualClock
        return super()._user_connection(connection)

    def _submit_sync(
        self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Task[Any]:
        self.started()
        return super()._submit_sync(target, args, kwargs)

    def _after_fork_in_child(self) -> None:
        """Reset the state in the child of a fork, which starts a thread of its own."""
        super()._after_fork_in_child()
        self._start_lock, self._thread = threading.Lock(), None


def in_tests() -> bool:
    """Return whether Django's test environment is set up."""
    utils = sys.modules.get("django.test.utils")  # a test runner has imported it
    return utils is not None and hasattr(utils._TestState, "saved_data")


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

    - If "database" in the settings chose that database as the store, and it is PostgreSQL's, the
      task is part of the transaction.
    - Otherwise, also with a "url" of the same database, it is submitted after the commit, and lost
      if the process dies in between.
    - Arguments and options are those of `submit`.
    """
    connection = connections[using]
    if scheduler.database == using and connection.vendor == "postgresql":
        function.submit_sync(*args, connection=connection, **kwargs)
    else:
        transaction.on_commit(functools.partial(function.submit_sync, *args, **kwargs), using)


scheduler = ProjectScheduler(getattr(settings, "TICKWHEEL", {}))

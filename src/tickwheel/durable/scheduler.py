"""`Scheduler`: durable tasks in the user's own process."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import secrets
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from tickwheel.arguments import bounded, nanoseconds
from tickwheel.clock import forkable
from tickwheel.durable.blocking import Blocking
from tickwheel.durable.directory.vault import Vault
from tickwheel.durable.function import TaskFunction
from tickwheel.durable.implementations import channels_for, coordinator_for, store_at
from tickwheel.durable.steps.node import Node
from tickwheel.durable.steps.submit import MAX_BODY_BYTES
from tickwheel.durable.verbs import Verbs
from tickwheel.errors import NotStarted
from tickwheel.values.service import Backoff, Service, seconds_of
from tickwheel.values.task import MAX_SHARDS, SHARDS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Self

    from tickwheel.clock import Clock

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

WEEK = timedelta(days=7)
TASK_OPTIONS = ("name", "max_attempts", "backoff", "timeout", "concurrency", "enabled")


class Scheduler(Verbs):
    """Durable tasks: stored before they are acknowledged, run when they are due.

    - `url`: `sqlite:///tasks.db` (three slashes and a path; four for one from the root), or
      `postgresql://user@host/database`.
    - `dispatch=False`: this process submits and asks, and runs nothing.
    - `coordinator`: "solo" or "postgres"; by default the one that fits the store.
    - `horizon`: tasks due within so many seconds are kept in memory, `cap` of them at most.
    - `threads`: how many plain functions may run at once.
    - `retention`: for how long final tasks are kept, and `audit_retention` lines of the audit log,
      None being for ever; `grace`: how long `stop` waits for functions.
    - `shards` counts when the store is made.
    - `max_body`: how many bytes a payload may have.
    - Services that are called over HTTP: `allow_private_targets`, or networks in `allow_targets`,
      let them be on private addresses; `own_port`, on which this process listens itself, is
      called on no address of this host; `max_calls` are under way at once, fewer where the limit
      of file descriptors is low; `secret_key` seals their secrets in the store.
    """

    def __init__(
        self,
        url: str,
        *,
        dispatch: bool = True,
        coordinator: str | None = None,
        horizon: float = 60.0,
        cap: int = 50_000,
        threads: int = 32,
        retention: float | timedelta = WEEK,
        audit_retention: float | timedelta | None = None,
        grace: float = 10.0,
        shards: int = SHARDS,
        node: str | None = None,
        clock: Clock | None = None,
        allow_private_targets: bool = False,
        allow_targets: Sequence[str] = (),
        own_port: int | None = None,
        max_calls: int = 10_000,
        secret_key: str | None = None,
        max_body: int = MAX_BODY_BYTES,
    ) -> None:
        nanoseconds("horizon", horizon)
        nanoseconds("grace", grace)
        nanoseconds("retention", seconds_of(retention))
        if audit_retention is not None:
            audit_retention = seconds_of(audit_retention)
            nanoseconds("audit_retention", audit_retention)
        bounded("cap", cap, 1, 100_000_000)
        bounded("threads", threads, 1, 10_000)
        bounded("shards", shards, 1, MAX_SHARDS)
        self._make_store = functools.partial(store_at, url, shards=shards, clock=clock)
        self._make_store()  # what is wrong with the URL is said now
        self._coordinator = coordinator_for(url, coordinator)
        self._dispatch = dispatch
        self._horizon = horizon
        self._cap = cap
        self._retention = seconds_of(retention)
        self._audit_retention = audit_retention
        self._grace = grace
        self._clock = clock
        self._name = node
        self._functions: dict[str, TaskFunction[..., Any]] = {}
        self._make_channels = functools.partial(
            channels_for, self._functions, threads=threads, allow_private=allow_private_targets,
            allow=tuple(allow_targets), own_port=own_port,
            max_calls=bounded("max_calls", max_calls, 1, 1_000_000),
        )  # fmt: skip
        self._vault = Vault(secret_key)
        self._max_body = bounded("max_body", max_body, 1, 1 << 30)
        self._services: dict[str, Service] = {}
        self._node: Node | None = None
        self._starting = False
        self._stopping = False
        forkable.add(self)

    @overload
    def task(self, function: Callable[P, R], /) -> TaskFunction[P, R]: ...

    @overload
    def task(
        self,
        *,
        name: str | None = None,
        max_attempts: int = 5,
        backoff: Backoff | Sequence[float] | float | timedelta | None = None,
        timeout: float | timedelta | None = 60.0,
        concurrency: int = 100,
        enabled: bool = True,
    ) -> Callable[[Callable[P, R]], TaskFunction[P, R]]: ...

    def task(self, function: Any = None, **options: Any) -> Any:
        """Make a task function of a plain or coroutine function.

        - `name`: what its tasks are stored under; by default the function's own name.
        - `max_attempts`: calls in all. `backoff`: a `Backoff`, seconds, or a list of seconds.
        - `timeout`: seconds that one attempt may take, or None.
        - `concurrency`: how many of them all processes together run at once; each has an equal
          part, and one at least. `enabled=False`: none, they wait.
        """
        if function is None:
            return lambda function: self._register(function, **options)
        return self._register(function, **options)

    def _register(
        self, function: Callable[P, R], *, name: str | None = None, **options: Any
    ) -> TaskFunction[P, R]:
        if not callable(function):
            raise TypeError(f"a task must be a function, got {function!r:.100}")
        name = name or getattr(function, "__name__", None)
        if name is None or name == "<lambda>":
            raise TypeError(f"{function!r:.100} has no name of its own: give it name=...")
        if name in self._functions and not redefines(function, self._functions[name].call):
            raise ValueError(f"there is a task named {name!r} already; give one of them name=...")
        if options.get("timeout") is not None:
            options["timeout"] = seconds_of(options["timeout"])
        backoff = options.pop("backoff", None)
        if backoff is not None:
            options["backoff"] = Backoff.of(backoff)
        unknown = options.keys() - set(TASK_OPTIONS)
        if unknown:
            raise TypeError(f"a task has no option {min(unknown)!r}; there are {TASK_OPTIONS}")
        made = TaskFunction(self, function, Service(name, **options))
        self._functions[name] = made
        self._services[name] = made.service
        return made

    async def start(self) -> None:
        """Open the store and begin; `async with` does this."""
        if self._node is not None or self._starting:
            raise RuntimeError("the scheduler has been started already")
        self._starting = True
        try:
            await self._start()
        finally:
            self._starting = False

    async def _start(self) -> None:
        store = self._make_store()
        try:
            await store.open()
            name = self._name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
            coordinator = self._coordinator(store, name)
            coordinator.functions = self._functions.keys
            self._node = Node(
                store, coordinator, self._services, self._make_channels(store.now_ms),
                vault=self._vault, max_body=self._max_body, name=name,
                dispatches=self._dispatch, horizon=self._horizon,
                cap=self._cap, retention=self._retention, audit_retention=self._audit_retention,
                clock=self._clock,
            )  # fmt: skip
            await self._node.start()
        except BaseException:
            self._node = None
            await store.close()
            raise

    async def stop(self, grace: float | None = None) -> None:
        """Take no more, finish or hand back what is under way, and close the store.

        `grace`: how long that may take; by default as long as the scheduler was made with.
        """
        node = self._started()
        if self._stopping:
            raise RuntimeError("the scheduler is being stopped already")
        self._stopping = True
        try:
            await node.stop(
                self._grace if grace is None else grace
            )  # until then, functions that still run may submit
        finally:
            self._node, self._stopping = None, False
            await node.store.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def blocking(self) -> Blocking:
        """Return the same verbs for a program without an event loop: `with app.blocking() as b`."""
        return Blocking(self)

    def run(self, verb: Coroutine[Any, Any, T]) -> T:
        """Have a verb done on the scheduler's loop, and wait for its answer: for other threads.

        In a plain task function: `app.run(other.submit("o-1", delay=60))`.
        """
        if self._node is None or asyncio._get_running_loop() is not None:
            verb.close()
            if self._node is not None:
                raise RuntimeError("this thread has an event loop: await the verb instead")
        loop = self._started().loop
        return asyncio.run_coroutine_threadsafe(verb, loop).result()

    @property
    def running(self) -> bool:
        """Whether it has been started, and not been stopped."""
        return self._node is not None

    @property
    def node(self) -> Node:
        """The node that runs here: its parts, for whoever shows or serves them."""
        return self._started()

    def _forked(self) -> None:
        """In the child of a fork: what runs is the parent's; here it may be started anew."""
        self._node = None
        self._starting = self._stopping = False

    def _started(self) -> Node:
        running = asyncio._get_running_loop()
        if self._node is not None and running not in (None, self._node.loop):
            raise RuntimeError(
                "the scheduler runs on another event loop: from a thread use app.run(...), or the"
                " verbs of app.blocking()"
            )
        if self._node is None:
            raise NotStarted(
                "the scheduler is not running: use `async with app`, or `with app.blocking()`"
            )
        return self._node


def redefines(function: Callable[..., Any], earlier: Callable[..., Any]) -> bool:
    """Return whether a function is a new definition of an earlier one: a notebook cell run again.

    Each run of a changed cell has a file name of its own, and an unchanged one its place in the
    same file. Two functions of one name in one file are a mistake.
    """
    if not (inspect.isfunction(function) and inspect.isfunction(earlier)):
        return False
    if function is earlier or function.__module__ != earlier.__module__:
        return False
    new, old = function.__code__, earlier.__code__
    return function.__qualname__ == earlier.__qualname__ and (
        new.co_filename != old.co_filename or new.co_firstlineno == old.co_firstlineno
    )

"""`Scheduler`: durable tasks in the user's own process."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import secrets
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol, TypeVar, overload

from tickwheel.arguments import bounded, nanoseconds
from tickwheel.clock import forkable
from tickwheel.durable.blocking import Blocking, submit_sync
from tickwheel.durable.coordinator import check_weight
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
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from os import PathLike
    from typing import Self

    from opentelemetry.trace import TracerProvider

    from tickwheel.clock import Clock
    from tickwheel.durable.channel import Channel
    from tickwheel.durable.function import Hook
    from tickwheel.durable.tracing import Tracing
    from tickwheel.durable.verbs.arguments import Target
    from tickwheel.values.task import Task

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
H = TypeVar("H", bound="Hook")

WEEK = timedelta(days=7)
TASK_OPTIONS = ("name", "max_attempts", "backoff", "timeout", "concurrency", "enabled")


class Decorator(Protocol):
    """`@app.task(...)`: it makes a task function of a function."""

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> TaskFunction[P, Coroutine[Any, Any, T], T]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> TaskFunction[P, R, R]: ...


class Binding(NamedTuple):
    """The store of a scheduler, and how it is used."""

    url: str
    clock: Clock | None
    coordinator: str | None
    dispatch: bool | Sequence[str]


class Scheduler(Verbs):
    """Durable tasks: stored before they are acknowledged, run when they are due.

    - `url`: `sqlite:///tasks.db`, `postgresql://user@host/database`, or for tests `memory://`,
      which `stop` empties. A path after three slashes is relative to the working directory, one
      after four is absolute. Its directory must exist.
    - `dispatch=False`: this process submits and queries tasks, and runs none before `run_due`. A
      list of names of task functions: of the functions it has, it runs only these.
    - `clock`: a `ManualClock`, for tests.
    - `coordinator`: "solo", "postgres" or "zookeeper://host1:2181,host2:2181/path"; by default the
      one that fits the store.
    - `horizon`: keep tasks due within this many seconds in memory, at most `cap` of them.
    - `threads`: how many plain functions may run at once.
    - `retention`: how long to keep final tasks; `audit_retention`: how long to keep the audit log,
      None for ever; `grace`: how long `stop` waits for functions.
    - `shards`: applies only when the store is created.
    - `weight`: this node's part of the shards, relative to the others'; with "solo" one node has
      all. `address`: the URL of an API that this process serves, shown to the other nodes.
    - `max_body`: the largest payload, in bytes.
    - `channels`: channels of your own, by protocol; `stop` closes them.
    - `tracing`: a span of OpenTelemetry for each attempt, which continues the trace of its submit;
      True for your program's tracer provider, or another provider.
    - For services that are called over a network: `allow_private_targets`, or networks in
      `allow_targets`, permit private addresses; `own_port`, on which this process itself listens,
      is refused on every address of this host; `max_calls` limits the calls under way, and a low
      limit of file descriptors lowers it; `secret_key` encrypts their secrets in the store;
      `grpc_tls` names files in PEM form for calls over gRPC: certificate authorities to trust,
      this process's own certificate, and its key, each a path or None.
    """

    def __init__(
        self,
        url: str,
        *,
        dispatch: bool | Sequence[str] = True,
        coordinator: str | None = None,
        horizon: float = 60.0,
        cap: int = 50_000,
        threads: int = 32,
        retention: float | timedelta = WEEK,
        audit_retention: float | timedelta | None = None,
        grace: float = 10.0,
        shards: int = SHARDS,
        node: str | None = None,
        weight: float = 1.0,
        address: str | None = None,
        clock: Clock | None = None,
        allow_private_targets: bool = False,
        allow_targets: Sequence[str] = (),
        own_port: int | None = None,
        max_calls: int = 10_000,
        secret_key: str | None = None,
        max_body: int = MAX_BODY_BYTES,
        channels: Mapping[str, Channel] | None = None,
        grpc_tls: Sequence[str | PathLike[str] | None] | None = None,
        tracing: bool | TracerProvider = False,
    ) -> None:
        nanoseconds("horizon", horizon)
        nanoseconds("grace", grace)
        nanoseconds("retention", seconds_of(retention))
        if audit_retention is not None:
            audit_retention = seconds_of(audit_retention)
            nanoseconds("audit_retention", audit_retention)
        bounded("cap", cap, 1, 100_000_000)
        bounded("threads", threads, 1, 10_000)
        self._shards = bounded("shards", shards, 1, MAX_SHARDS)
        self._bind(Binding(url, clock, coordinator, dispatch))
        self._horizon = horizon
        self._cap = cap
        self._retention = seconds_of(retention)
        self._audit_retention = audit_retention
        self._grace = grace
        self._name = node
        self._about = {"weight": check_weight(weight), "address": address}
        self._functions: dict[str, TaskFunction[..., Any]] = {}
        self._make_channels = functools.partial(
            channels_for, self._functions, threads=threads, allow_private=allow_private_targets,
            allow=tuple(allow_targets), own_port=own_port,
            max_calls=bounded("max_calls", max_calls, 1, 1_000_000), own=channels or {},
            grpc_tls=grpc_tls,
        )  # fmt: skip
        self._vault = Vault(secret_key)
        self._max_body = bounded("max_body", max_body, 1, 1 << 30)
        self._services: dict[str, Service] = {}
        self._hooks: list[Hook] = []
        self._tracing: Tracing | None = None
        if tracing:
            from tickwheel.durable.tracing import Tracing  # noqa: PLC0415 - needs OpenTelemetry

            self._tracing = Tracing(None if tracing is True else tracing)
        self._node: Node | None = None
        self._parents_node: Node | None = None  # in the child of a fork
        self._starting = False
        self._stopping = False
        forkable.add(self)

    def rebind(
        self,
        url: str,
        *,
        coordinator: str | None = None,
        clock: Clock | None = None,
        dispatch: bool | Sequence[str] = True,
    ) -> None:
        """Use another store from the next start on; the task functions stay.

        - `coordinator`, `clock` and `dispatch` are those given here, or else the defaults: the
          scheduler's own do not stay. Hooks and all other options do.
        - For tests of a module's scheduler, and for programs that read the URL late.
        """
        if self._node is not None or self._starting:
            raise RuntimeError("the scheduler is running: stop it before rebind()")
        self._bind(Binding(url, clock, coordinator, dispatch))

    def _bind(self, binding: Binding) -> None:
        url, clock, coordinator, dispatch = binding
        if isinstance(dispatch, str):
            raise TypeError(f"dispatch must be True, False or a list of names, got {dispatch!r}")
        make_store = functools.partial(store_at, url, shards=self._shards, clock=clock)
        make_store()  # raises now for an invalid URL
        self._coordinator = coordinator_for(url, coordinator, clock)
        self._make_store = make_store
        self._clock = clock
        self.dispatch = dispatch  # may be changed until `start`
        self._binding = binding

    @overload
    def task(
        self, function: Callable[P, Coroutine[Any, Any, T]], /
    ) -> TaskFunction[P, Coroutine[Any, Any, T], T]: ...

    @overload
    def task(self, function: Callable[P, R], /) -> TaskFunction[P, R, R]: ...

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
    ) -> Decorator: ...

    def task(self, function: Any = None, **options: Any) -> Any:
        """Turn a plain or coroutine function into a task function.

        - `name`: the service of its tasks; by default the function's own name.
        - `max_attempts`: calls in all. `backoff`: a `Backoff`, seconds, or a list of seconds.
        - `timeout`: of one attempt, in seconds, or None.
        - `concurrency`: how many all processes together run at once; each process has an equal
          part, and at least one. With `enabled=False` its tasks wait.
        """
        if function is None:
            return lambda function: self._register(function, **options)
        return self._register(function, **options)

    def _register(
        self, function: Callable[P, R], *, name: str | None = None, **options: Any
    ) -> TaskFunction[P, R, Any]:
        if not callable(function):
            raise TypeError(f"a task must be a function, got {function!r:.100}")
        name = name or getattr(function, "__name__", None)
        if name is None or name == "<lambda>":
            raise TypeError(f"{function!r:.100} has no name: give it name=...")
        if name in self._functions and not redefines(function, self._functions[name].call):
            raise ValueError(f"a task named {name!r} exists already; give one of them name=...")
        if options.get("timeout") is not None:
            options["timeout"] = seconds_of(options["timeout"])
        backoff = options.pop("backoff", None)
        if backoff is not None:
            options["backoff"] = Backoff.of(backoff)
        unknown = options.keys() - set(TASK_OPTIONS)
        if unknown:
            raise TypeError(f"a task has no option {min(unknown)!r}; there are {TASK_OPTIONS}")
        made: TaskFunction[P, R, Any] = TaskFunction(self, function, Service(name, **options))
        self._functions[name] = made
        if self._runs(name):
            self._services[name] = made.service
        return made

    def _runs(self, name: str) -> bool:
        """Return whether this process runs the task function of this name, if it has it."""
        return isinstance(self.dispatch, bool) or name in self.dispatch

    def _functions_to_run(self) -> list[str]:
        return [name for name in self._functions if self._runs(name)]

    def _select_functions(self) -> None:
        """Give the node the functions that this process runs."""
        if not isinstance(self.dispatch, bool):
            unknown = [name for name in self.dispatch if name not in self._functions]
            if unknown or not self.dispatch:
                raise ValueError(
                    f"dispatch must name task functions of this scheduler, got {[*self.dispatch]};"
                    f" there are {sorted(self._functions)}"
                )
        self._services.clear()
        self._services.update(
            {name: self._functions[name].service for name in self._functions_to_run()}
        )

    def around(self, hook: H) -> H:
        """Enter a context around each attempt of a task function: `@app.around`.

        `hook(task)` returns a context manager; a generator with `@contextmanager` is the short
        form. Its code before the `yield` runs before the function, its code after it afterwards, in
        the function's own thread and context. An exception of the function is raised at the
        `yield`, and counts even if the hook catches it. An exception of the hook fails the attempt.
        """
        self._hooks.append(hook)
        return hook

    async def start(self) -> None:
        """Open the store and start; `async with` does this."""
        if self._node is not None or self._starting:
            raise RuntimeError("the scheduler has been started already")
        self._starting = True
        try:
            await self._start()
        finally:
            self._starting = False

    async def _start(self) -> None:
        self._select_functions()
        store = self._make_store()
        try:
            await store.open()
            name = self._name or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
            coordinator = self._coordinator(store, name, **self._about)
            coordinator.functions = self._functions_to_run
            node = Node(
                store, coordinator, self._services, self._make_channels(store.now_ms),
                vault=self._vault, max_body=self._max_body, name=name,
                dispatches=self.dispatch is not False, horizon=self._horizon,
                cap=self._cap, retention=self._retention, audit_retention=self._audit_retention,
                clock=self._clock,
            )  # fmt: skip
            if self._tracing is not None:
                node.trace(self._tracing)
            await node.start()
        except BaseException:
            await store.close()
            raise
        self._node = node  # from now on other threads may use it

    async def stop(self, grace: float | None = None) -> None:
        """Claim no more tasks, finish or release the running ones, and close the store.

        `grace`: how long that may take; by default the scheduler's own.
        """
        node = self._running_node()
        if self._stopping:
            raise RuntimeError("the scheduler is being stopped already")
        self._stopping = True
        try:
            # Until this returns, functions that still run may submit.
            await node.stop(self._grace if grace is None else grace)
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

    def _submit_sync(
        self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Task[Any]:
        return submit_sync(self, self.run, target, args, kwargs)

    def run(self, verb: Coroutine[Any, Any, T]) -> T:
        """Run a verb on the scheduler's loop from another thread, and wait for its result.

        In a plain task function: `app.run(app.cancel_key("order:o-1"))`.
        """
        if self._node is None or asyncio._get_running_loop() is not None:
            verb.close()
            if self._node is not None:
                raise RuntimeError("this thread has an event loop: await the verb instead")
        loop = self._running_node().loop
        return asyncio.run_coroutine_threadsafe(verb, loop).result()

    @property
    def running(self) -> bool:
        """Whether it is started and not stopped."""
        return self._node is not None

    @property
    def node(self) -> Node:
        """The running node, for code that shows or serves its parts."""
        return self._running_node()

    def _after_fork_in_child(self) -> None:
        """Reset the state in the child of a fork: the running node is the parent's.

        It is kept: a pending asyncio task that is destroyed logs an error.
        """
        self._parents_node, self._node = self._node, None
        self._starting = self._stopping = False

    def _running_node(self) -> Node:
        node = self._node
        if node is None:
            raise NotStarted(
                f"the scheduler of the {self._make_store().where} is not running: use"
                " `async with app`, `with app.blocking()`, or where neither fits, as in Flask,"
                " `app.blocking().start()`"
            )
        if threading.get_ident() == node.thread_id and node.loop.is_running():
            return node  # asking asyncio costs a system call
        running = asyncio._get_running_loop()
        if running is not node.loop and running is not None:
            raise RuntimeError(
                "the scheduler runs on another event loop: from a thread use app.run(...), or the"
                " verbs of app.blocking()"
            )
        return node


def redefines(function: Callable[..., Any], earlier: Callable[..., Any]) -> bool:
    """Return whether a function redefines an earlier one: a notebook cell that runs again.

    Each run of a changed cell has its own file name, and an unchanged cell has its place in the
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

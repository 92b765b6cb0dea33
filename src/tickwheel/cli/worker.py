"""`worker`: run the task functions of an embedded scheduler until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import sys
import traceback
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tickwheel.cli import exit_codes
from tickwheel.cli.output import examples
from tickwheel.cli.terminal import print_line, print_message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from tickwheel.config import Listen
    from tickwheel.durable import Scheduler

    Expose = Callable[[Scheduler, Callable[[], bool]], AbstractAsyncContextManager[None]]

logger = logging.getLogger("tickwheel.worker")

WATCH_SECONDS = 0.5  # between two looks at the files
GRACE_SECONDS = 3600.0  # the workers' own grace ends them earlier
MAX_PROCESSES = 256
UNWATCHED = {"__pycache__", "node_modules", "site-packages"}


@click.command(
    epilog=examples(
        "tickwheel worker shop:app",
        "tickwheel worker shop:app --reload",
        "tickwheel worker shop:app --processes 4 --only send_mail --only resize",
        "tickwheel worker shop:app --processes 4 --metrics-listen 127.0.0.1:9464",
    )
)
@click.argument("app", metavar="MODULE:NAME")
@click.option(
    "--only", multiple=True, metavar="FUNCTION",
    help="Run only this task function; may be repeated. Others are left to other workers.",
)  # fmt: skip
@click.option(
    "--processes", type=click.IntRange(1, MAX_PROCESSES), default=1, show_default=True,
    help="How many processes; one that dies is replaced.",
)  # fmt: skip
@click.option(
    "--reload", is_flag=True,
    help="For development: start again when a Python file in this directory or below changes.",
)  # fmt: skip
@click.option(
    "--metrics-listen", metavar="HOST:PORT",
    help="Answer Prometheus at http://HOST:PORT/metrics, without tokens; port 0 is any free port."
    " Several processes answer as one.",
)  # fmt: skip
@click.option("--lifeline", type=int, hidden=True)
@click.option("--shared-metrics", hidden=True)
def worker(app: str, **options: Any) -> int:
    """Run the task functions of a scheduler.

    MODULE:NAME is the scheduler, as in `from MODULE import NAME`; modules are looked for in this
    directory, too. It runs tasks even if it was made with dispatch=False, so a web process and its
    workers may share a module.

    SIGTERM or Ctrl-C stops it: functions that run have the scheduler's `grace` to end. A second
    signal ends it at once; its tasks are then tried again. SIGHUP stops it if its terminal was
    closed, and is ignored without a terminal.

    Exit codes: 0 after a signal, 2 if the scheduler cannot be imported or the address is in use.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("tickwheel").setLevel(logging.INFO)
    command = [sys.executable, "-m", "tickwheel", "worker", app]
    return run_worker(partial(load_scheduler, app), app, command, Options(**options))


class Options(NamedTuple):
    """The options of the command; the last two are for the processes that it starts itself."""

    only: Sequence[str] = ()
    processes: int = 1
    reload: bool = False
    metrics_listen: str | None = None
    lifeline: int | None = None
    shared_metrics: str | None = None


def run_worker(
    load: Callable[[], Scheduler],
    target: str,
    command: list[str],
    options: Options,
    watched: Sequence[Path] = (Path(),),
) -> int:
    """Run a scheduler in this process, or in others that `command` starts; return the exit code.

    `load` returns the scheduler, and `target` names it; `watched` are the folders of --reload. A
    wrong option raises UsageError.
    """
    if not hasattr(signal, "SIGHUP"):
        raise click.UsageError(
            "a worker runs on Linux and macOS; on this system start the scheduler in a program of"
            " your own, with `async with app:` or `with app.blocking():`"
        )
    if not 1 <= options.processes <= MAX_PROCESSES:
        raise click.UsageError(f"--processes must be 1 to {MAX_PROCESSES}, got {options.processes}")
    if options.reload and options.processes > 1:
        raise click.UsageError("--reload needs --processes 1")
    command = [*command, *(word for name in options.only for word in ("--only", name))]
    address = parse_address(options.metrics_listen) if options.metrics_listen else None
    if options.reload:
        command += ["--metrics-listen", str(address)] if address else []
        return asyncio.run(run_with_reload(command, watched))
    if options.processes > 1:
        return run_processes(command, options.processes, address)
    scheduler = load()
    if options.only or not scheduler.dispatch:
        scheduler.dispatch = options.only or True
    with contextlib.ExitStack() as stack:
        expose = exposer(stack, address, options.shared_metrics)
        try:
            asyncio.run(run(scheduler, target, options.lifeline, expose))
        except ValueError as error:  # an unknown name in --only
            raise click.UsageError(str(error)) from error
    return exit_codes.OK


def parse_address(text: str) -> Listen:
    """Return the address that an option gives."""
    from tickwheel.config import LISTEN  # noqa: PLC0415 - not for --help

    try:
        address: Listen = LISTEN.parse(text)
    except ValueError:
        message = f"must be {LISTEN.expected}, got {text!r:.100}"
        raise click.BadParameter(message, param_hint="--metrics-listen") from None
    return address


def exposer(stack: contextlib.ExitStack, address: Listen | None, shared: str | None) -> Expose:
    """Return what answers Prometheus while a scheduler runs; `stack` closes its socket."""
    if address is None and shared is None:
        return lambda *_: contextlib.nullcontext()
    from tickwheel.web import metrics_listener as listening  # noqa: PLC0415 - only for this option

    if shared is not None:
        part = listening.Shared.from_text(shared)
        return lambda scheduler, orphaned: listening.answer_as_worker(scheduler, part, orphaned)
    assert address is not None
    try:
        bound = listening.bind_listener(address, flag="--metrics-listen")
        listener = stack.enter_context(bound)
    except OSError as error:
        raise click.UsageError(str(error)) from error
    print_line(f"metrics: {listening.metrics_url(address, listener)}", err=True)
    return lambda scheduler, _: listening.answer_scrapes(listener, scheduler.metrics)


def load_scheduler(target: str) -> Scheduler:
    """Import the scheduler that `module:name` names."""
    from tickwheel.durable import Scheduler  # noqa: PLC0415 - not for --help

    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise click.UsageError(f"write module:name, such as shop:app; got {target!r}")
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and is_part_of(module_name, error.name):
            text = f"no module is named {error.name!r}, here ({Path.cwd()}) or among the installed"
            raise click.UsageError(text) from error
        print_message(traceback.format_exc().rstrip())
        raise click.UsageError(f"importing {module_name!r} failed, see above") from error
    found = getattr(module, name, None)
    if isinstance(found, Scheduler):
        return found
    known = [key for key, value in vars(module).items() if isinstance(value, Scheduler)]
    known_text = f"; it has {', '.join(f'{module_name}:{key}' for key in known)}" if known else ""
    what = "nothing" if found is None else f"a {type(found).__name__}, not a Scheduler,"
    raise click.UsageError(f"module {module_name!r} has {what} named {name!r}{known_text}")


def is_part_of(module: str, missing: str | None) -> bool:
    """Return whether a missing module is `module` itself or one of its packages."""
    return missing is not None and f"{module}.".startswith(f"{missing}.")


async def run(scheduler: Scheduler, target: str, lifeline: int | None, expose: Expose) -> None:
    """Run a scheduler until a signal, or until the process that started this one is gone."""
    loop, stop, orphaned = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)  # a second one ends the process

    def on_supervisor_gone(pipe: int) -> None:
        loop.remove_reader(pipe)
        orphaned.set()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    handle_hangup(stop)
    if lifeline is not None:
        loop.add_reader(lifeline, on_supervisor_gone, lifeline)
    async with scheduler, expose(scheduler, orphaned.is_set):
        names = sorted(scheduler.node.services)
        print_line(f"worker {os.getpid()} runs {', '.join(names)} of {target}", err=True)
        await stop.wait()


def handle_hangup(stop: asyncio.Event) -> None:
    """Stop at SIGHUP if it means that the terminal was closed; without a terminal, ignore it."""

    def on_hangup() -> None:
        if sys.stderr.isatty():
            stop.set()
        else:
            logger.info("ignoring SIGHUP; SIGTERM stops this worker")

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_hangup)


def run_processes(command: list[str], number: int, address: Listen | None) -> int:
    """Run several workers until a signal; with an address, they answer Prometheus together."""
    if address is None:
        return asyncio.run(supervise(number, lambda _: (command, ())))
    from tickwheel.web import metrics_listener as listening  # noqa: PLC0415 - only for this option

    with contextlib.ExitStack() as stack:
        try:
            listener, directory = stack.enter_context(listening.share_listener(address))
        except (ImportError, OSError) as error:
            raise click.UsageError(str(error)) from error
        print_line(f"metrics: {listening.metrics_url(address, listener)}", err=True)
        shared = listener.fileno()

        def command_of(worker: int) -> tuple[list[str], tuple[int]]:
            part = listening.Shared(shared, worker, number, directory)
            return [*command, "--shared-metrics", part.to_text()], (shared,)

        return asyncio.run(supervise(number, command_of))


async def supervise(
    number: int, command_of: Callable[[int], tuple[list[str], tuple[int, ...]]]
) -> int:
    """Run several workers; `command_of` gives the command of each, and the files it inherits."""
    from tickwheel.supervisor import Supervisor  # noqa: PLC0415 - for several processes only

    async def start(worker: int, lifeline: int) -> asyncio.subprocess.Process:
        command, files = command_of(worker)
        return await start_worker(command, lifeline, *files)

    return await Supervisor(number, start, grace=GRACE_SECONDS, logger=logger).run()


async def start_worker(
    command: list[str], lifeline: int, *files: int
) -> asyncio.subprocess.Process:
    """Start a worker that ends when this process does."""
    return await asyncio.create_subprocess_exec(
        *command, "--lifeline", str(lifeline), pass_fds=(lifeline, *files), start_new_session=True
    )


async def run_with_reload(command: list[str], watched: Sequence[Path]) -> int:
    """Run a worker, and start it again whenever a file in these folders changes.

    This process does not import the program: each worker reads all of it itself.
    """
    stop, end_at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (end_at_once if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    handle_hangup(stop)
    lifeline, _ = os.pipe()
    while not stop.is_set():
        seen = file_times(watched)
        process = await start_worker(command, lifeline)
        changed = None
        while changed is None and not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), WATCH_SECONDS)
            now = file_times(watched)
            changed = next((name for name, _ in seen.items() ^ now.items()), None)
        if changed is not None and not stop.is_set():
            print_line(f"{changed} has changed: starting again", err=True)
        await end_worker(process, end_at_once)
    return exit_codes.OK


async def end_worker(process: asyncio.subprocess.Process, at_once: asyncio.Event) -> None:
    """Stop a worker and wait for its end; kill it when `at_once` is set."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    ended, hurried = asyncio.ensure_future(process.wait()), asyncio.ensure_future(at_once.wait())
    await asyncio.wait({ended, hurried}, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not ended.done():
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await ended


def file_times(watched: Sequence[Path]) -> dict[str, int]:
    """Return the Python files in folders and below, and when each was changed."""
    found = {}
    for path, folders, files in chain.from_iterable(map(os.walk, watched)):
        folders[:] = [name for name in folders if name[0] != "." and name not in UNWATCHED]
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        for name in [name for name in files if name.endswith(".py")]:
            full = Path(path, name)
            with contextlib.suppress(OSError):  # it was removed just now
                found[str(full)] = full.stat().st_mtime_ns
    return found

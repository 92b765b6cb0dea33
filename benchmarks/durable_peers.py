"""Run the task libraries that tickwheel is compared with, each in its own environment.

They cannot be installed together: arq needs an older Redis client than Celery. So each
gets a virtual environment under build/peers, created on first use. A library that cannot be
installed, or that fails, raises `Missing` with the reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from durable_stage import ROOT, Stage
from jvm import Missing, last_line

ENVIRONMENTS = ROOT / "build" / "peers"
CLIENT = Path(__file__).parent / "peers" / "client.py"
INSTALL_SECONDS = 300
REQUIREMENTS = {
    "celery": ("celery[redis]>=5.5,<6",),
    "dramatiq": ("dramatiq[redis]>=2,<3",),
    "huey": ("huey>=3,<4", "redis"),
    "arq": ("arq>=0.26,<1",),
    "procrastinate": ("procrastinate>=3,<4", "psycopg[binary]"),
    "apscheduler": ("apscheduler>=3.10,<4", "sqlalchemy>=2,<3"),
}


@dataclass(frozen=True)
class Library:
    """A task library on one broker."""

    label: str
    package: str
    broker: str
    durability: str
    guarantee: str
    fsync: str = "always"


LIBRARIES = {
    "celery": Library(
        "Celery / Redis", "celery", "redis", "fsync per write",
        "in the worker's memory until due; not run again if a worker died during it",
    ),
    "celery_second": Library(
        "Celery / Redis, fsync once a second", "celery", "redis", "the last second may be lost",
        "the same", "everysec",
    ),
    "dramatiq": Library(
        "Dramatiq / Redis", "dramatiq", "redis", "fsync per write",
        "in the worker's memory until due; at least once: a dead worker's messages are requeued",
    ),
    "dramatiq_second": Library(
        "Dramatiq / Redis, fsync once a second", "dramatiq", "redis", "the last second may be lost",
        "the same", "everysec",
    ),
    "huey": Library(
        "Huey / Redis", "huey", "redis", "fsync per write",
        "at most once: removed from the queue before it runs; due times read once a second",
    ),
    "huey_second": Library(
        "Huey / Redis, fsync once a second", "huey", "redis", "the last second may be lost",
        "the same", "everysec",
    ),
    "huey_sqlite": Library(
        "Huey / SQLite", "huey", "sqlite", "fsync per commit", "the same"
    ),
    "arq": Library(
        "arq / Redis", "arq", "redis", "fsync per write",
        "at least once: stays in the queue until it has ended; polled every 0.5 s",
    ),
    "arq_second": Library(
        "arq / Redis, fsync once a second", "arq", "redis", "the last second may be lost",
        "the same", "everysec",
    ),
    "procrastinate": Library(
        "Procrastinate / PostgreSQL", "procrastinate", "postgres", "fsync per commit",
        "states kept in the database; an interrupted task needs a task of yours to retry it; "
        "due times polled every 5 s",
    ),
    "apscheduler": Library(
        "APScheduler 3 / SQLite", "apscheduler", "sqlite", "fsync per commit",
        "in the submitting process; removed from the database when handed to a thread",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Amount:
    """The amount to measure of each library."""

    submit_seconds: float
    count: int
    seconds: float
    burst: int
    limit_seconds: float


def environment(package: str) -> Path:
    """Return the Python of a library's environment; create the environment if needed."""
    folder, wanted = ENVIRONMENTS / package, "\n".join(REQUIREMENTS[package])
    python, stamp = folder / "bin" / "python", folder / "installed"
    if not stamp.exists() or stamp.read_text() != wanted:
        run_install([sys.executable, "-m", "venv", str(folder)])
        run_install([str(python), "-m", "pip", "install", "-q", *REQUIREMENTS[package]])
        stamp.write_text(wanted)
    return python


def run_install(command: list[str]) -> None:
    """Run one step of an installation."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise Missing(f"not installed within {INSTALL_SECONDS} s") from None
    if done.returncode:
        raise Missing(f"cannot be installed: {last_line(done.stderr)}")


def measure(stage: Stage, library: Library, amount: Amount) -> dict[str, Any]:
    """Return the figures of one library; "failed" among them is an error on the way."""
    python = environment(library.package)
    sqlite = library.broker == "sqlite"
    broker = str(stage.path()) if sqlite else stage.fresh(library.broker, library.fsync)
    always = library.fsync == "always"  # lateness hardly depends on the disk
    log = stage.path()
    log.touch()
    variables = {"BROKER": broker, "LEDGER": str(stage.path()), "LOG": str(log)}
    command = [python, CLIENT, f"on_{library.package}", library.package]
    command += ["--submit-seconds", amount.submit_seconds, "--count", amount.count if always else 0]
    command += ["--seconds", amount.seconds, "--burst", amount.burst]
    process = subprocess.Popen(
        [str(word) for word in command],
        env=os.environ | {f"TICKWHEEL_BENCH_{name}": value for name, value in variables.items()},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,  # the client and its worker are one process group, killed together
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=amount.limit_seconds)
    except subprocess.TimeoutExpired:
        raise Missing(f"not done after {amount.limit_seconds:.0f} s") from None
    finally:
        end_group(process)
    if process.returncode or not output:
        raise Missing(f"its run failed: {last_line(errors or log.read_text())}")
    figures: dict[str, Any] = json.loads(output)
    return figures


def end_group(process: subprocess.Popen[str]) -> None:
    """Kill a client and its remaining worker processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

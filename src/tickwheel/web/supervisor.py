"""Several workers on one socket, each its own node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING

from tickwheel.supervisor import Supervisor
from tickwheel.web.server import (
    INHERITED_VARIABLE,
    Inherited,
    announce,
    announce_grpc,
    reserve_port,
)
from tickwheel.web.worker_metrics import socket_directory

if TYPE_CHECKING:
    import socket

    from tickwheel.config import Config

logger = logging.getLogger("tickwheel.web")


def supervise(config: Config, listener: socket.socket) -> int:
    """Run the workers until a signal stops them; return the exit code."""
    with socket_directory() as directory, contextlib.ExitStack() as stack:
        grpc_port = 0
        if config.grpc_listen is not None:
            held = stack.enter_context(reserve_port(config.grpc_listen, shared=True))
            grpc_port = held.getsockname()[1]
        return asyncio.run(run_workers(config, listener, directory, grpc_port))


async def run_workers(
    config: Config, listener: socket.socket, directory: str, grpc_port: int
) -> int:
    """Run the configured number of workers, all of which accept from `listener`."""

    async def start(number: int, lifeline: int) -> asyncio.subprocess.Process:
        shared = listener.fileno(), lifeline
        inherited = Inherited(*shared, number, config.workers, grpc_port, directory)
        environ = {**os.environ, INHERITED_VARIABLE: inherited.to_text()}
        if config.node is not None:
            environ["TICKWHEEL_NODE"] = f"{config.node}-{number}"
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tickwheel", *without_node(sys.argv[1:]),
            env=environ, pass_fds=shared, start_new_session=True,
        )  # fmt: skip

    def announce_all() -> None:
        announce(config, listener)
        if grpc_port:
            announce_grpc(config, grpc_port)

    listener.set_inheritable(True)
    supervisor = Supervisor(config.workers, start, grace=config.grace, logger=logger)
    return await supervisor.run(announce_all)


def without_node(words: list[str]) -> list[str]:
    """Return the command line without --node: each worker has its own name."""
    kept, skip = [], False
    for word in words:
        if skip or word.startswith("--node="):
            skip = False
        elif word == "--node":
            skip = True
        else:
            kept.append(word)
    return kept

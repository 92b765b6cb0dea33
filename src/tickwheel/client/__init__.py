"""`Client` and `AsyncClient`: use a tickwheel server from Python.

`Client` needs no other package; `AsyncClient` needs `pip install 'tickwheel[client]'`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tickwheel.client.errors import ApiError, ServerTimedOut, ServerUnavailable, problem_of
from tickwheel.client.json import Json
from tickwheel.client.requests import InsecureToken
from tickwheel.client.sync import Client
from tickwheel.client.task import Task
from tickwheel.client.values import (
    Attempt,
    Audit,
    Health,
    Node,
    Page,
    Schedule,
    Service,
    Shard,
    Submitted,
    Verdict,
)
from tickwheel.values.task import State

if TYPE_CHECKING:
    from tickwheel.client.aio import AsyncClient

__all__ = [
    "ApiError",
    "AsyncClient",
    "Attempt",
    "Audit",
    "Client",
    "Health",
    "InsecureToken",
    "Json",
    "Node",
    "Page",
    "Schedule",
    "ServerTimedOut",
    "ServerUnavailable",
    "Service",
    "Shard",
    "State",
    "Submitted",
    "Task",
    "Verdict",
    "problem_of",
]


def __getattr__(name: str) -> Any:
    # Imported lazily: it needs packages that programs with only `Client` may lack.
    if name != "AsyncClient":
        raise AttributeError(f"module 'tickwheel.client' has no attribute {name!r}")
    value = import_module("tickwheel.client.aio").AsyncClient
    globals()[name] = value
    return value

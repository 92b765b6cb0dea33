"""Durable delayed tasks: the database is the truth, the wheel fires what is due soon."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tickwheel.errors import (
    AlreadyReplayed,
    AttemptOver,
    CannotDrain,
    KeyReused,
    KeyTaken,
    NotStarted,
    Overloaded,
    ScheduleChanged,
    ServiceChanged,
    ServiceInUse,
    StoreUnavailable,
    TargetRefused,
    TaskGone,
    UnknownNode,
    UnknownSchedule,
    UnknownService,
    UnknownTask,
    WrongStore,
)
from tickwheel.values.outcome import Fail, Retry, Snooze
from tickwheel.values.schedule import Schedule
from tickwheel.values.service import Backoff, Breaker, Service
from tickwheel.values.task import Attempt, Page, State, Task, Verdict

if TYPE_CHECKING:
    from tickwheel.durable.blocking import Blocking
    from tickwheel.durable.channels.local import current_task
    from tickwheel.durable.function import Request, TaskFunction
    from tickwheel.durable.scheduler import Scheduler

__all__ = [
    "AlreadyReplayed",
    "Attempt",
    "AttemptOver",
    "Backoff",
    "Blocking",
    "Breaker",
    "CannotDrain",
    "Fail",
    "KeyReused",
    "KeyTaken",
    "NotStarted",
    "Overloaded",
    "Page",
    "Request",
    "Retry",
    "Schedule",
    "ScheduleChanged",
    "Scheduler",
    "Service",
    "ServiceChanged",
    "ServiceInUse",
    "Snooze",
    "State",
    "StoreUnavailable",
    "TargetRefused",
    "Task",
    "TaskFunction",
    "TaskGone",
    "UnknownNode",
    "UnknownSchedule",
    "UnknownService",
    "UnknownTask",
    "Verdict",
    "WrongStore",
    "current_task",
]

# The scheduler imports asyncio and all the steps; a program that only needs the values does not.
_LATER = {
    "Blocking": "tickwheel.durable.blocking",
    "Request": "tickwheel.durable.function",
    "Scheduler": "tickwheel.durable.scheduler",
    "TaskFunction": "tickwheel.durable.function",
    "current_task": "tickwheel.durable.channels.local",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'tickwheel.durable' has no attribute {name!r}")
    value = getattr(import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})

"""Durable delayed tasks: the database is the truth, the wheel fires what is due soon."""

from tickwheel.durable.blocking import Blocking
from tickwheel.durable.channels.local import current_task
from tickwheel.durable.function import Request, TaskFunction
from tickwheel.durable.outcome import Fail, Retry, Snooze
from tickwheel.durable.schedule import Schedule
from tickwheel.durable.scheduler import Scheduler
from tickwheel.durable.service import Backoff, Breaker, Service
from tickwheel.durable.task import Attempt, Page, State, Task, Verdict
from tickwheel.errors import (
    AlreadyReplayed,
    AttemptOver,
    KeyReused,
    KeyTaken,
    NotStarted,
    Overloaded,
    ServiceChanged,
    ServiceInUse,
    StoreUnavailable,
    TargetRefused,
    TaskGone,
    UnknownSchedule,
    UnknownService,
    UnknownTask,
    WrongStore,
)

__all__ = [
    "AlreadyReplayed",
    "Attempt",
    "AttemptOver",
    "Backoff",
    "Blocking",
    "Breaker",
    "Fail",
    "KeyReused",
    "KeyTaken",
    "NotStarted",
    "Overloaded",
    "Page",
    "Request",
    "Retry",
    "Schedule",
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
    "UnknownSchedule",
    "UnknownService",
    "UnknownTask",
    "Verdict",
    "WrongStore",
    "current_task",
]

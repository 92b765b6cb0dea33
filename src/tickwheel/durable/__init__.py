"""Durable delayed tasks: the database is the truth, the wheel fires what is due soon."""

from tickwheel.durable.blocking import Blocking
from tickwheel.durable.channels.local import current_task
from tickwheel.durable.function import Request, TaskFunction
from tickwheel.durable.scheduler import Scheduler
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
from tickwheel.values.outcome import Fail, Retry, Snooze
from tickwheel.values.schedule import Schedule
from tickwheel.values.service import Backoff, Breaker, Service
from tickwheel.values.task import Attempt, Page, State, Task, Verdict

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

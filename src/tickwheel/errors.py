"""What can go wrong, by name: one base class, few leaves, each with a stable code.

Plain misuse of an argument (a float for an int, a limit of 0) stays a plain TypeError or
ValueError. This module knows nothing of the rest of the package.
"""


class TickwheelError(Exception):
    """Base of every error that tickwheel raises on its own account."""

    code = "tickwheel_error"


class OutOfRange(TickwheelError, ValueError):
    """A time that no wheel can hold, or that lies beyond this wheel's interval."""

    code = "out_of_range"


class TimeWentBack(TickwheelError, ValueError):
    """`advance` was given a time before the one that the wheel has reached."""

    code = "time_went_back"


class WheelBusy(TickwheelError, RuntimeError):
    """`advance` was called from inside `advance`: by a destructor, or by an overflow buffer."""

    code = "wheel_busy"


class TimerClosed(TickwheelError, RuntimeError):
    """Something was scheduled on a timer that has been closed."""

    code = "timer_closed"


class StoreUnavailable(TickwheelError, ConnectionError):
    """The store cannot be reached, is locked, full or read-only; nothing was acknowledged."""

    code = "store_unavailable"


class WrongStore(TickwheelError, ValueError):
    """The database is another program's, or of a version that this one cannot work with."""

    code = "wrong_store"


class Locked(StoreUnavailable):
    """Another transaction holds what this one needs, a key say, and did not let go in time."""

    code = "locked"


class Overloaded(TickwheelError, RuntimeError):
    """More is waiting to be stored than the queue may hold: try again after `retry_after` s."""

    code = "overloaded"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class KeyTaken(TickwheelError, ValueError):
    """A live task of this service has the key already: `holder` is its id."""

    code = "key_taken"

    def __init__(self, message: str, holder: str) -> None:
        super().__init__(message)
        self.holder = holder


class UnknownTask(TickwheelError, LookupError):
    """No task, live or final, has this id."""

    code = "unknown_task"


class TaskGone(UnknownTask):
    """The request was made before, and its task has ended since and is not kept any more."""

    code = "task_gone"


class UnknownService(TickwheelError, LookupError):
    """No function and no service has this name."""

    code = "unknown_service"


class ServiceInUse(TickwheelError, ValueError):
    """The service has live tasks: they have to end or be cancelled before it can go."""

    code = "service_in_use"


class ServiceChanged(TickwheelError, ValueError):
    """The service is not of the version that it was to have: another has changed it meanwhile."""

    code = "service_changed"


class AttemptOver(TickwheelError, ValueError):
    """Feedback for an attempt that is not the running one: it changes nothing."""

    code = "attempt_over"


class KeyReused(TickwheelError, ValueError):
    """The idempotency key was used before, for another request."""

    code = "idempotency_key_reused"


class TargetRefused(TickwheelError, ValueError):
    """An endpoint that must not be called: a private address, another scheme."""

    code = "target_refused"


class UnknownSchedule(TickwheelError, LookupError):
    """No schedule has this name."""

    code = "unknown_schedule"


class AlreadyReplayed(TickwheelError, ValueError):
    """The task has yet to end, or was replayed before: a second replay needs `force`."""

    code = "already_replayed"


class NotStarted(TickwheelError, RuntimeError):
    """The scheduler is not running: use it inside `async with`, or `with app.blocking()`."""

    code = "not_started"

"""The errors of the package: one base class, and leaves with stable codes.

A wrong argument (a float for an int, a limit of 0) raises a plain TypeError or ValueError. This
module imports nothing from the package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssl import SSLCertVerificationError

UNKNOWN_AUTHORITY = range(18, 22)  # OpenSSL's codes: self-signed, or no issuer that is trusted


def certificate_reason(error: SSLCertVerificationError) -> str:
    """Return why a certificate is refused, and how to trust an authority of one's own."""
    reason = f"its certificate is refused: {error.verify_message}"
    if error.verify_code in UNKNOWN_AUTHORITY:
        reason += "; the variable SSL_CERT_FILE names a file of trusted authorities"
    return reason


class TickwheelError(Exception):
    """The base class of tickwheel's errors."""

    code = "tickwheel_error"


class OutOfRange(TickwheelError, ValueError):
    """The time is beyond what any wheel can hold, or beyond this wheel's interval."""

    code = "out_of_range"


class TimeWentBack(TickwheelError, ValueError):
    """`advance` was called with a time before the wheel's current time."""

    code = "time_went_back"


class WheelBusy(TickwheelError, RuntimeError):
    """A destructor or an overflow buffer called `advance` from inside `advance`."""

    code = "wheel_busy"


class TimerClosed(TickwheelError, RuntimeError):
    """The timer or purgatory is closed: nothing can be scheduled on it."""

    code = "timer_closed"


class StoreUnavailable(TickwheelError, ConnectionError):
    """The store is unreachable, locked, full or read-only; nothing was acknowledged."""

    code = "store_unavailable"


class WrongStore(TickwheelError, ValueError):
    """The database belongs to another program, or has an unsupported version."""

    code = "wrong_store"


class Locked(StoreUnavailable):
    """Another transaction held a lock, for example on a key, for too long."""

    code = "locked"


class Overloaded(TickwheelError, RuntimeError):
    """The queue of requests to store is full: retry after `retry_after` seconds."""

    code = "overloaded"

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class KeyTaken(TickwheelError, ValueError):
    """A live task of this service already has the key; `holder` is its id."""

    code = "key_taken"

    def __init__(self, message: str, holder: str) -> None:
        super().__init__(message)
        self.holder = holder


class UnknownTask(TickwheelError, LookupError):
    """No task, live or final, has this id."""

    code = "unknown_task"


class TaskGone(UnknownTask):
    """The request is a repetition, and its task has ended and was deleted since."""

    code = "task_gone"


class UnknownService(TickwheelError, LookupError):
    """No function and no service has this name."""

    code = "unknown_service"


class ServiceInUse(TickwheelError, ValueError):
    """The service has live tasks, which must end or be cancelled before it is deleted."""

    code = "service_in_use"


class ServiceChanged(TickwheelError, ValueError):
    """The service does not have the expected version: it was changed in the meantime."""

    code = "service_changed"


class ScheduleChanged(TickwheelError, ValueError):
    """The schedule is not the expected one: it was changed in the meantime."""

    code = "schedule_changed"


class AttemptOver(TickwheelError, ValueError):
    """The feedback is for an attempt that is not running any more; it was ignored."""

    code = "attempt_over"


class KeyReused(TickwheelError, ValueError):
    """The idempotency key was already used for a different request."""

    code = "idempotency_key_reused"


class TargetRefused(TickwheelError, ValueError):
    """The endpoint is not allowed: it has a private address or another scheme."""

    code = "target_refused"


class UnknownSchedule(TickwheelError, LookupError):
    """No schedule has this name."""

    code = "unknown_schedule"


class AlreadyReplayed(TickwheelError, ValueError):
    """The task has not ended, or was already replayed; a second replay needs `force`."""

    code = "already_replayed"


class UnknownNode(TickwheelError, LookupError):
    """No registered node has this name."""

    code = "unknown_node"


class CannotDrain(TickwheelError, ValueError):
    """No other node could take the shards of the drained node."""

    code = "cannot_drain"


class NotStarted(TickwheelError, RuntimeError):
    """The scheduler is not running: use `async with app` or `with app.blocking()`."""

    code = "not_started"

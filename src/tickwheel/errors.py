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

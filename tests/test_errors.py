"""The errors: one base class, and leaves with stable codes."""

import pytest

import tickwheel
from tickwheel import errors

LEAVES = {
    "OutOfRange": (ValueError, "out_of_range"),
    "TimeWentBack": (ValueError, "time_went_back"),
    "TimerClosed": (RuntimeError, "timer_closed"),
    "WheelBusy": (RuntimeError, "wheel_busy"),
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_refines_the_base_and_a_builtin(name):
    leaf = getattr(errors, name)
    builtin, code = LEAVES[name]
    assert issubclass(leaf, errors.TickwheelError)
    assert issubclass(leaf, builtin)
    assert leaf.code == code
    assert leaf("message").code == code
    assert leaf.__doc__


def test_the_base_is_an_exception_with_a_code():
    assert issubclass(errors.TickwheelError, Exception)
    assert isinstance(errors.TickwheelError.code, str)


def test_no_two_errors_share_a_code():
    found = [
        error
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.TickwheelError)
    ]
    assert len({error.code for error in found}) == len(found)


def test_the_package_exports_the_same_classes():
    for name in ("TickwheelError", *LEAVES):
        assert getattr(tickwheel, name) is getattr(errors, name)


def test_the_wheels_raise_these_classes_and_no_others(core):
    wheel = core.SimpleWheel(size=8, start=5)
    with pytest.raises(ValueError) as far:
        wheel.schedule(100, "a")
    assert type(far.value) is errors.OutOfRange
    with pytest.raises(ValueError) as back:
        wheel.advance(4)
    assert type(back.value) is errors.TimeWentBack

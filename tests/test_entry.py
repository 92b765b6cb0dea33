"""Entry: the handle that `schedule` returns."""

import copy
import pickle
import weakref

import pytest

from tickwheel import MemoryBuffer, OutOfRange

KINDS = {
    "Wheel": {"size": 20},
    "sizes": {"sizes": (20, 20, 20)},
    "SimpleWheel": {"size": 600},
    "RoundsWheel": {"size": 20},
}


@pytest.fixture(params=KINDS)
def wheel(core, request):
    kind = "Wheel" if request.param == "sizes" else request.param
    return getattr(core, kind)(**KINDS[request.param])


def test_a_pending_entry_knows_its_expiry_and_its_item(wheel):
    item = object()
    entry = wheel.schedule(24, item)
    assert entry.pending is True
    assert entry.expiry == 24
    assert entry.item is item
    assert repr(entry) == "<Entry expiry=24 pending>"


def test_a_fired_entry_keeps_its_expiry_and_releases_its_item(wheel):
    entry = wheel.schedule(24, "a")
    assert wheel.advance(30) == ["a"]
    assert entry.pending is False
    assert entry.expiry == 24
    assert entry.item is None
    assert repr(entry) == "<Entry expiry=24 not pending>"
    assert entry.cancel() is False
    assert entry.reschedule(50) is False
    assert entry.expiry == 24


@pytest.mark.parametrize("expiry", [0, 5, 24, 450])
def test_cancel_is_true_once_and_it_never_fires(wheel, expiry):
    entry, other = wheel.schedule(expiry, "a"), wheel.schedule(expiry, "b")
    assert entry.cancel() is True
    assert entry.pending is False
    assert entry.item is None
    assert entry.expiry == expiry
    assert entry.cancel() is False
    assert entry.reschedule(7) is False
    assert len(wheel) == 1
    wheel._check()
    assert wheel.advance(500) == ["b"]
    assert other.pending is False


def test_cancel_of_first_middle_and_last_in_one_bucket(wheel):
    for gone in range(5):
        entries = wheel.schedule_many([wheel.now + 400] * 5, range(5))
        assert entries[gone].cancel()
        wheel._check()
        assert wheel.advance(wheel.now + 400) == [n for n in range(5) if n != gone]


def test_cancel_during_cascades_loses_no_other_entry(core, pointers):
    wheel = core.Wheel(size=20, pointers=pointers)
    for now in (0, 399, 400, 439, 440, 449):
        wheel.advance(now)
        entry, stays = wheel.schedule(450, "cancelled"), wheel.schedule(450, now)
        assert stays.pending
        assert entry.cancel()
        wheel._check()
    assert wheel.advance(450) == [0, 399, 400, 439, 440, 449]


@pytest.mark.parametrize(  # due, on level 1, 2 and 3: within a level, and up and down
    ("expiry", "to"),
    [(0, 5), (0, 450), (5, 0), (5, 5), (5, 24), (24, 5), (24, 450), (450, 24), (450, 599)],
)
def test_reschedule_moves_it(wheel, expiry, to):
    entry = wheel.schedule(expiry, "a")
    assert entry.reschedule(to) is True
    assert entry.expiry == to
    assert entry.item == "a"
    assert entry.pending
    assert len(wheel) == 1
    assert wheel.next_expiry() == to
    wheel._check()
    if to:
        assert wheel.advance(to - 1) == []
    assert wheel.advance(to) == ["a"]


def test_reschedule_checks_its_argument_even_when_it_is_not_pending(wheel):
    entry = wheel.schedule(5, "a")
    entry.cancel()
    for bad, error in ((1.5, TypeError), (True, TypeError), (-1, OutOfRange), (2**63, OutOfRange)):
        with pytest.raises(error):
            entry.reschedule(bad)
    assert entry.expiry == 5


def test_reschedule_out_of_range_leaves_it_in_its_place_and_order(core):
    for wheel in (core.Wheel(sizes=(8, 8)), core.SimpleWheel(size=64)):
        first, second = wheel.schedule_many([9, 9], "ab")
        spot = wheel.where(first)
        with pytest.raises(OutOfRange, match="64"):
            first.reschedule(64)
        assert (first.expiry, first.pending, wheel.where(first)) == (9, True, spot)
        assert second.pending
        wheel._check()
        assert wheel.advance(9) == ["a", "b"]


def test_reschedule_moves_it_in_time_over_and_over(wheel):
    entry = wheel.schedule(5, "a")
    for now in range(0, 3000, 7):
        assert wheel.advance(now) == []
        assert entry.reschedule(now + 30)
    assert len(wheel) == 1
    wheel._check()
    assert wheel.advance(2996 + 30) == ["a"]


def test_an_item_may_be_anything_even_none(wheel):
    entry = wheel.schedule(5, None)
    assert entry.pending
    assert entry.item is None
    wheel.schedule(5, entry)
    wheel.schedule(5, wheel)
    assert wheel.advance(5) == [None, entry, wheel]


def test_one_item_may_be_scheduled_many_times(wheel):
    item = []
    for expiry in (5, 9, 5):
        wheel.schedule(expiry, item)
    assert [x is item for x in wheel.advance(9)] == [True] * 3


def test_an_entry_can_be_weakly_referenced(wheel):
    entry = wheel.schedule(5, "a")
    reference = weakref.ref(entry)
    assert reference() is entry
    del entry
    assert reference() is not None  # the wheel keeps it alive
    assert wheel.advance(5) == ["a"]
    assert reference() is None


def test_entries_compare_by_identity(wheel):
    one, two = wheel.schedule(5, "a"), wheel.schedule(5, "a")
    assert one != two
    assert one == one  # noqa: PLR0124
    assert len({one, two}) == 2
    assert hash(one) == hash(one)
    before = hash(one)
    wheel.advance(5)
    assert hash(one) == before


@pytest.mark.parametrize("kind", KINDS)
def test_entries_survive_their_wheel_but_are_no_longer_pending(core, kind):
    wheel = getattr(core, "Wheel" if kind == "sizes" else kind)(**KINDS[kind])
    entries = wheel.schedule_many([0, 5, 24, 450], "abcd")
    reference = weakref.ref(wheel)
    del wheel
    assert reference() is None
    for entry, expiry in zip(entries, (0, 5, 24, 450), strict=True):
        assert entry.pending is False
        assert entry.item is None
        assert entry.expiry == expiry
        assert entry.cancel() is False
        assert entry.reschedule(7) is False
        assert repr(entry) == f"<Entry expiry={expiry} not pending>"


def test_an_entry_in_a_buffer_survives_its_wheel_too(core):
    buffer = MemoryBuffer()
    wheel = core.Wheel(sizes=(8, 8), overflow=buffer)
    entry = wheel.schedule(1000, "far")
    assert entry.pending
    del wheel
    assert entry.pending is False
    assert entry.item is None
    assert entry.cancel() is False


def test_an_entry_cannot_be_made_by_hand(core):
    with pytest.raises(TypeError, match=r"cannot create 'tickwheel\.Entry' instances"):
        core.Entry()
    with pytest.raises(TypeError, match="cannot create"):
        core.Entry(5, "a")


def test_no_attribute_of_an_entry_can_be_set(wheel):
    entry = wheel.schedule(5, "a")
    for name in ("expiry", "item", "pending", "rounds", "colour"):
        with pytest.raises(AttributeError):
            setattr(entry, name, 1)
        with pytest.raises(AttributeError):
            delattr(entry, name)
    assert (entry.expiry, entry.item, entry.pending) == (5, "a", True)


@pytest.mark.parametrize("kind", ["Entry", "Wheel", "SimpleWheel", "RoundsWheel"])
def test_no_class_of_the_wheels_can_be_subclassed(core, kind):
    with pytest.raises(TypeError, match=f"type 'tickwheel.{kind}' is not an acceptable base type"):
        type("Sub", (getattr(core, kind),), {})


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_neither_entries_nor_wheels_can_be_copied_or_pickled(wheel, how):
    entry = wheel.schedule(5, "a")
    with pytest.raises(TypeError, match="cannot pickle 'Entry' object"):
        how(entry)
    with pytest.raises(TypeError, match=f"cannot pickle '{type(wheel).__name__}' object"):
        how(wheel)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="cannot pickle"):
            pickle.dumps(entry, protocol)
    assert wheel.advance(5) == ["a"]


@pytest.mark.parametrize("kind", ["Entry", "Wheel", "SimpleWheel", "RoundsWheel"])
def test_the_classes_have_tickwheel_as_their_module(core, kind):
    found = getattr(core, kind)
    assert found.__module__ == "tickwheel"
    assert found.__name__ == found.__qualname__ == kind


def test_every_public_name_has_a_docstring(core):
    for kind in ("Entry", "Wheel", "SimpleWheel", "RoundsWheel"):
        found = getattr(core, kind)
        assert found.__doc__
        for name in dir(found):
            if not name.startswith("_"):
                assert getattr(found, name).__doc__, f"{kind}.{name} has no docstring"

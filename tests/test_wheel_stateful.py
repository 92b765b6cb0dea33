"""Every wheel compared with a sorted list, under random scripts.

- A Hypothesis state machine per kind of wheel and core, `_check()` after every step: 500 runs here,
  2,000 in `make soak`.
- A random driver without Hypothesis: short here, TICKWHEEL_SOAK_STEPS in `make soak`.
- Lockstep: one script on the native and the pure wheel at once, every answer compared.
"""

import os
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import cores as wheel_cores
from model import LAST, Shape, Trial

RUNS = 300  # total, over kinds and cores
SOAK_RUNS = 2_000
STEPS = 40

GROWING = [
    Shape(size=20),
    Shape(size=2, start=5),
    Shape(size=3, tick=7, start=25, pointers="pushed"),
    Shape(size=8, pointers="pushed"),
    Shape(size=64, tick=1000, start=999),
    Shape(size=100, tick=3),
    Shape(size=1024, start=2**40 - 3, pointers="pushed"),
    Shape(size=20, start=LAST - 5000),
    Shape(size=7, tick=2**40 + 1, start=2**41),
]
BOUNDED = [
    Shape(sizes=(8, 8, 8)),
    Shape(sizes=(8, 8, 8), overflow=True),
    Shape(sizes=(8, 8, 8), overflow=True, pointers="pushed", tick=5, start=63),
    Shape(sizes=(60, 60, 12), start=43_199),
    Shape(sizes=(2, 3, 5), overflow=True),
    Shape(sizes=(2, 2), overflow=True, start=LAST - 300),
    Shape(sizes=(5, 2, 7), tick=3, pointers="pushed", start=100),
    Shape(sizes=(16,), overflow=True),
    Shape(sizes=(1024, 3), overflow=True, tick=2),
]
SIMPLE = [
    Shape("SimpleWheel", size=20),
    Shape("SimpleWheel", size=2, tick=3, start=7),
    Shape("SimpleWheel", size=60, start=59),
    Shape("SimpleWheel", size=100, tick=10),
    Shape("SimpleWheel", size=64, start=LAST - 500),
]
ROUNDS = [
    Shape("RoundsWheel", size=8),
    Shape("RoundsWheel", size=20, tick=3, start=50),
    Shape("RoundsWheel", size=2),
    Shape("RoundsWheel", size=64, start=LAST - 3000),
    Shape("RoundsWheel", size=100, tick=7),
]
KINDS = {"growing": GROWING, "bounded": BOUNDED, "simple": SIMPLE, "rounds": ROUNDS}
SHARE = {"growing": 0.3, "bounded": 0.3, "simple": 0.2, "rounds": 0.2}
EVERY_SHAPE = [shape for shapes in KINDS.values() for shape in shapes]


def delays(shape):
    """Delays in time units: near, at the edges of levels, and far."""
    edges = {1}
    for size in shape.sizes or (shape.size,) * 3:
        edges |= {edge * size for edge in edges}
    edges = sorted(edge * shape.tick + by for edge in edges for by in (-1, 0, 1))
    near = st.integers(-3 * shape.tick, 3 * shape.lowest_size * shape.tick)
    return st.one_of(near, st.sampled_from(edges), st.integers(0, 40 * edges[-1]))


class WheelMachine(RuleBasedStateMachine):
    """One wheel and its model; a subclass selects the shapes and the core."""

    shapes = ()
    core = None

    @initialize(data=st.data())
    def build(self, data):
        self.shape = data.draw(st.sampled_from(self.shapes))
        self.trial = Trial(self.shape, [self.core])
        self.delay = delays(self.shape)

    def after(self, data):
        return self.trial.clamp(self.trial.model.now + data.draw(self.delay))

    def some_key(self, data):
        keys = list(self.trial.handles)
        return keys[data.draw(st.integers(0, len(keys) - 1))]

    def has_handles(self):
        return bool(self.trial.handles)

    @rule(data=st.data())
    def schedule(self, data):
        self.trial.schedule(self.after(data))

    @rule(data=st.data(), shift=st.integers(0, 9))
    def schedule_two_at_one_tick(self, data, shift):
        expiry = self.after(data)
        self.trial.schedule(expiry)
        self.trial.schedule(self.trial.clamp(expiry - shift % self.shape.tick))

    @rule(data=st.data())
    def schedule_many(self, data):
        now = self.trial.model.now
        chosen = data.draw(st.lists(self.delay, max_size=8))
        self.trial.schedule_many([self.trial.clamp(now + delay) for delay in chosen])

    @precondition(has_handles)
    @rule(data=st.data())
    def cancel(self, data):
        self.trial.cancel(self.some_key(data))

    @precondition(has_handles)
    @rule(data=st.data(), several=st.integers(0, 5))
    def cancel_many(self, data, several):
        self.trial.cancel_many([self.some_key(data) for _ in range(several)])

    @precondition(has_handles)
    @rule(data=st.data())
    def reschedule(self, data):
        self.trial.reschedule(self.some_key(data), self.after(data))

    @rule(data=st.data())
    def advance(self, data):
        self.trial.advance(max(self.after(data), self.trial.model.now))

    @rule(data=st.data(), limit=st.integers(1, 4))
    def advance_with_a_limit(self, data, limit):
        self.trial.advance(max(self.after(data), self.trial.model.now), limit)

    @rule(data=st.data(), limit=st.integers(1, 2))
    def leave_a_rest_and_place_others_around_it(self, data, limit):
        """An entry scheduled while a backlog exists is placed relative to now."""
        now = max(self.after(data), self.trial.model.now)
        self.trial.advance(now, limit)
        for delay in data.draw(st.lists(self.delay, max_size=4)):
            self.trial.schedule(self.trial.clamp(now + delay))

    @rule()
    def cancel_all_that_is_due(self):
        """The next wake-up is then the next bucket, even after a limit."""
        model = self.trial.model
        due = [key for key, record in model.records.items() if record.due <= model.cursor]
        self.trial.cancel_many(due)

    @rule()
    def advance_to_the_same_now(self):
        self.trial.advance(self.trial.model.now)

    @rule(limit=st.none() | st.integers(1, 3))
    def advance_to_the_next_wakeup(self, limit):
        wakeup = self.trial.wheels[0].next_wakeup()
        if wakeup is not None and wakeup <= LAST:
            self.trial.advance(wakeup, limit)

    @rule()
    def advance_to_just_before_the_next_expiry(self):
        expiry = self.trial.wheels[0].next_expiry()
        if expiry is not None:
            self.trial.advance(max(expiry - 1, self.trial.model.now))

    @invariant()
    def it_is_as_the_model_says(self):
        if hasattr(self, "trial"):
            self.trial.compare()


def run_machine(core, kind, runs):
    machine = type(f"{kind}_machine", (WheelMachine,), {"shapes": KINDS[kind], "core": core})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=int(runs * SHARE[kind]) // 2, stateful_step_count=STEPS),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_it_behaves_as_a_sorted_list_does(core, kind):
    run_machine(core, kind, RUNS)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_in_many_runs_it_behaves_as_a_sorted_list_does(core, kind):
    run_machine(core, kind, SOAK_RUNS)


class Driver:
    """A random script over one trial: cheap steps, many of them."""

    def __init__(self, shape, cores, seed, check_every):
        self.random = random.Random(seed)
        self.trial = Trial(shape, cores)
        self.shape = shape
        self.check_every = check_every
        self.target = 150  # approximate number of pending entries
        self.actions = [
            (24, self.schedule),
            (4, self.schedule_a_burst),
            (5, self.schedule_many),
            (16, self.cancel),
            (3, self.cancel_many),
            (12, self.reschedule),
            (14, self.advance),
            (14, self.advance_with_a_limit),
            (1, self.cancel_all_that_is_due),
            (5, self.step_to_the_next_wakeup),
        ]

    def time(self):
        """Return a time around now: near, at an edge of a level, far, or overdue."""
        unit = self.shape.tick * self.shape.lowest_size
        if self.shape.kind != "SimpleWheel":
            for _ in range(self.random.choice((0, 0, 0, 1, 1, 2, 3))):
                unit *= self.shape.lowest_size
        if self.random.random() < 0.2:
            delay = unit * self.random.randrange(3) + self.random.randrange(-2, 3)
        else:
            delay = self.random.randrange(-(unit // 20) - 2, unit + 2)
        return self.trial.clamp(self.trial.model.now + delay)

    def later(self):
        """Return a time not in the past; most steps are short, so that scripts stay in range."""
        span = self.shape.tick * self.random.choice((0, 0, 1, 1, 1, 3, self.shape.lowest_size))
        now = self.trial.model.now
        return now + self.random.randrange(min(span, (LAST - now) // 50) + 1)

    def key(self):
        if not self.trial.handles:
            self.schedule()
        keys = self.trial.handles
        return next(iter(keys)) if len(keys) == 1 else self.random.choice(list(keys))

    def schedule(self):
        self.trial.schedule(self.time())

    def schedule_a_burst(self):
        """Schedule many entries within a few ticks, which a limit splits."""
        first = self.time()
        for _ in range(self.random.randrange(20)):
            late = self.random.randrange(3 * self.shape.tick)
            self.trial.schedule(self.trial.clamp(first + late))

    def schedule_many(self):
        self.trial.schedule_many([self.time() for _ in range(self.random.randrange(6))])

    def cancel(self):
        if self.trial.handles:
            self.trial.cancel(self.key())

    def cancel_many(self):
        if self.trial.handles:
            several = 4 if len(self.trial.model) < self.target else 60
            self.trial.cancel_many([self.key() for _ in range(self.random.randrange(several))])

    def reschedule(self):
        if self.trial.handles:
            self.trial.reschedule(self.key(), self.time())

    def advance(self):
        self.trial.advance(self.later())

    def advance_with_a_limit(self):
        self.trial.advance(self.later(), self.random.choice((1, 1, 2, 3, 10, 2**70)))

    def cancel_all_that_is_due(self):
        model = self.trial.model
        self.trial.cancel_many(
            [k for k, record in model.records.items() if record.due <= model.cursor]
        )

    def step_to_the_next_wakeup(self):
        wakeup = self.trial.model.next_wakeup()
        if wakeup is not None and wakeup - self.trial.model.now <= (LAST - wakeup) // 50:
            self.trial.advance(wakeup)

    def run(self, steps):
        weights, actions = zip(*self.actions, strict=True)
        for step, action in enumerate(self.random.choices(actions, weights, k=steps)):
            action()
            if step % self.check_every == 0:
                self.trial.forget(keep=20)
                self.trial.compare()
        self.trial.compare()


def drive(shapes, cores, steps, seed, check_every):
    """Distribute `steps` over the shapes; a failure prints the seed."""
    print(f"seed {seed}")
    for shape in shapes:
        print(f"on {shape}")
        Driver(shape, cores, f"{seed} {shape}", check_every).run(max(1, steps // len(shapes)))


def test_twenty_thousand_random_steps_agree_with_the_model(core):
    drive(EVERY_SHAPE, [core], 20_000, random.randrange(2**32), check_every=20)


def test_native_and_pure_agree_in_lockstep_on_every_answer(both):
    drive(EVERY_SHAPE, both, 4_000, random.randrange(2**32), check_every=1)


@pytest.mark.soak
def test_a_soak_agrees_with_the_model(core):
    steps = int(os.environ.get("TICKWHEEL_SOAK_STEPS", "1000000"))
    seed = int(os.environ.get("TICKWHEEL_SOAK_SEED", random.randrange(2**32)))
    drive(EVERY_SHAPE, [core], steps, seed, check_every=100)


@pytest.mark.soak
def test_a_soak_of_native_and_pure_agrees_in_lockstep(both):
    steps = int(os.environ.get("TICKWHEEL_SOAK_STEPS", "1000000")) // 4
    seed = int(os.environ.get("TICKWHEEL_SOAK_SEED", random.randrange(2**32)))
    drive(EVERY_SHAPE, both, steps, seed, check_every=25)


def test_the_cores_of_this_run_are_the_selected_ones():
    """A run may test only one core if that was selected."""
    if not wheel_cores.PURE_ONLY and wheel_cores.CHOSEN is None:
        assert wheel_cores.NAMES == ["pure", "native"]

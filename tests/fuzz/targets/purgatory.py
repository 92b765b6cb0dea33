"""Operations and their lists, also changed from inside: native and in Python they do the same."""

from functools import cache

import cores
import tickwheel._wheel as native
from fuzz.source import Source
from model import HASHED_BY_DICT, answer
from stage import HandClock
from tickwheel import watchlists as pure

MOST_CALLS = 80
CHECK_EVERY = 16  # steps; the answers of every step are compared
KEYS = (*range(6), "key", [])  # the last cannot be hashed
STEPS = ("ready", "check", "cancel", "force", "again", "raise")
NO_STEP = ("", 0, 0)


@cache
def operation_class(core):
    class Step(core.Operation):
        """An operation that completes when `ready`; each of its methods may make one call."""

        def __init__(self, side, number, timeout, steps):
            super().__init__(timeout)
            self.side, self.number, self.ready, self.steps = side, number, False, steps
            self.left = 3  # calls that it makes: checks of its own key would never end

        def __repr__(self):
            return f"<operation {self.number}>"

        def try_complete(self):
            self.does("try")
            return self.ready and self.force_complete()

        def on_complete(self):
            self.does("complete")

        def on_expiration(self):
            self.does("expire")

        def _report_error(self, name, error):
            text = HASHED_BY_DICT.sub(r"\1", str(error))
            self.side.log.append((self.number, name, text))

        def does(self, what):
            self.side.log.append((self.number, what))
            where, step = self.steps
            if where == what and self.left and not self.side.inside:
                self.side.inside = True
                self.left -= 1
                try:
                    self.side.log.append(self.side.step(*step))
                finally:
                    self.side.inside = False

    return Step


class Side:
    """The lists of one core, on a timer whose clock moves by hand."""

    def __init__(self, core):
        self.clock = HandClock()
        name = "native" if core is native else "pure"
        self.timer = cores.load_deadlines(name)(0.001, self.clock)
        self.lists = core.WatchLists(self.timer, True)
        self.make = operation_class(core)
        self.ops = []
        self.log = []
        self.inside = False

    def watch(self, timeout, steps, ready, keys):
        self.ops.append(self.make(self, len(self.ops), timeout, steps))
        self.ops[-1].ready = ready
        return self.lists.try_complete_else_watch(self.ops[-1], keys)

    def step(self, name, number, key):
        """Make one call; `number` chooses the operation."""
        op = self.ops[-1 - number % len(self.ops)] if self.ops else None
        if name == "raise":
            raise RuntimeError("a fault of the operation")
        if name == "ready" and op is not None:
            op.ready = True
        elif name == "check":
            return self.lists.check_and_complete(key)
        elif name == "cancel":
            return self.lists.cancel(op)
        elif name == "force" and op is not None:
            return op.force_complete()
        elif name == "again" and op is not None:
            return self.lists.try_complete_else_watch(op, [key, number])
        return None

    def move(self, seconds):
        self.clock.add(seconds)
        return self.timer._run_due(1_000)

    def glance(self):
        """Return what is cheap enough for every step."""
        return self.lists.stats(), self.log[-3:]

    def state(self):
        self.lists._check()
        self.timer._check()
        stats = self.lists.stats()
        assert stats["delayed"] == self.lists.delayed == len(self.timer)
        watched = [[op.number for op in self.lists._watched_on(key)] for key in KEYS[:-1]]
        return stats, watched, [op.completed for op in self.ops], self.log


def run(data):
    source = Source(data)
    sides = [Side(core) for core in (pure, native)]

    def same(call, *args):
        one, other = (answer(call, side, *args) for side in sides)
        assert one == other, f"{call.__name__}{args}: pure {one}, native {other}"

    def look(call):
        one, other = map(call, sides)  # an error is a fault, even if both raise it
        assert one == other, f"pure {one}, native {other}"

    def step():
        return source.pick(STEPS), source.number(), source.pick(KEYS)

    for number in range(MOST_CALLS):
        if not source:
            break
        kind = source.number() % 8
        if kind < 3:
            timeout = source.pick((0, 0.001, 0.5, 3, 100, -1, None))
            where = source.pick(("", "try", "complete", "expire"))
            steps = where, step() if where else NO_STEP
            ready = source.pick((False, True))
            keys = [source.pick(KEYS) for _ in range(source.pick(range(4)))]
            same(Side.watch, timeout, steps, ready, keys)
        elif kind < 4:
            same(Side.move, source.pick((0, 0.001, 0.5, 3, 100)))
        else:
            same(Side.step, *step())
        look(Side.glance if number % CHECK_EVERY else Side.state)
    look(Side.state)

"""The scene of the purgatory: operations wait for events on keys, or for their deadline.

`wait` adds an operation that needs a number of events on a key, as a produce request needs the
acknowledgements of all replicas. `event` is one of them. The clock stands still between actions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import tickwheel
from tickwheel.scenes.script import Turns, check_empty, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.scenes.script import Action, Kinds


class Waiting(tickwheel.DelayedOperation):
    """An operation that is complete after `needed` events on its key."""

    def __init__(self, scene: PurgatoryScene, name: str, key: str, needed: int, timeout: int):
        super().__init__(timeout)
        self.scene = scene
        self.name = name
        self.key = key
        self.needed = needed
        self.first = scene.events_on(key)
        self.due_at = scene.now + timeout
        self.state = "watched"
        self.ended_at: int | None = None

    @property
    def arrived(self) -> int:
        """The number of events on its key since it was added, at most `needed`."""
        return min(self.needed, self.scene.events_on(self.key) - self.first)

    def try_complete(self) -> bool:
        return self.arrived >= self.needed and self.force_complete()

    def on_complete(self) -> None:
        self.state, self.ended_at = "completed", self.scene.now
        self.arrived_at_end = self.arrived
        self.scene.log("completed", self.name)

    def on_expiration(self) -> None:
        self.state = "expired"
        self.scene.log("expired", self.name)


class PurgatoryScene:
    """A purgatory on a timer with a manual clock."""

    verbs: ClassVar[dict[str, Kinds]] = {"wait": (str, int, int), "event": (str,)}

    def __init__(self, kind: str, script: Sequence[Action], options: dict[str, str]) -> None:
        self.at = number("at", options.pop("at", "0"))
        check_empty(options)
        self.now = 0
        self._script = script
        self._turns = Turns()
        self._clock = tickwheel.ManualClock()
        self._events: list[dict[str, Any]] = []
        self._counts: dict[str, int] = {}
        self._operations: list[Waiting] = []

    def events_on(self, key: str) -> int:
        """Return the number of events on a key so far."""
        return self._counts.get(key, 0)

    def log(self, what: str, name: str) -> None:
        """Note what happened to an operation or a key."""
        self._events.append({"at": self.now, "what": what, "entry": name})

    def show(self) -> dict[str, Any]:
        """Play the script up to `at`, and describe the state."""
        timer = tickwheel.Timer(clock=self._clock, tick=1.0)
        with timer, tickwheel.Purgatory("lab", timer=timer) as purgatory:
            rest = self._play(purgatory, list(self._script), self.at)
            state = self._state(purgatory)
            self._play(purgatory, rest, None)
        return {**state, "moments": sorted({event["at"] for event in self._events})}

    def _play(
        self, purgatory: tickwheel.Purgatory, script: list[Action], until: int | None
    ) -> list[Action]:
        """Act in the order of time, up to `until`; return the actions after it."""
        while True:
            self._turns.take()
            due = [one.due_at for one in self._operations if one.state == "watched"]
            times = [*due, *(action.at for action in script[:1])]
            if not times or (until is not None and min(times) > until):
                break
            self._move_to(min(times))
            if script and script[0].at <= self.now:
                self._act(purgatory, script.pop(0))
        if until is not None:
            self._move_to(until)
        return script

    def _move_to(self, now: int) -> None:
        """Advance the clock; by nothing, too, since that ends operations that are due at once."""
        self.now = max(self.now, now)
        self._clock.advance(self.now - self._clock.time())

    def _act(self, purgatory: tickwheel.Purgatory, action: Action) -> None:
        key = str(action.arguments[0])
        if action.verb == "event":
            self._counts[key] = self.events_on(key) + 1
            self.log("event", key)
            purgatory.check_and_complete(key)
            return
        needed, timeout = map(int, action.arguments[1:])
        operation = Waiting(self, f"{len(self._operations) + 1}", key, needed, timeout)
        self._operations.append(operation)
        self.log("watched", operation.name)
        purgatory.try_complete_else_watch(operation, [key])

    def _state(self, purgatory: tickwheel.Purgatory) -> dict[str, Any]:
        return {
            "now": self.at,
            "watched": purgatory.watched,
            "delayed": purgatory.delayed,
            "entries": [
                {
                    "name": one.name,
                    "key": one.key,
                    "needed": one.needed,
                    "arrived": one.arrived,
                    "due_at": one.due_at,
                    "ended_at": one.ended_at,
                    "state": one.state,
                }
                for one in self._operations
            ],
            "keys": dict(sorted(self._counts.items())),
            "events": list(self._events),
        }

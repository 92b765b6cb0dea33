"""The scene of a wheel: entries are placed, demoted and fired; drivers count their wake-ups.

The precise driver wakes when a bucket is due. The ticking driver wakes at every tick; a wake-up
without a due bucket is empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import tickwheel
from tickwheel.scenes.script import Turns, check_empty, choice, number, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.scenes.script import Action, Kinds

MAX_LEVELS = 6
LONGEST_TICK = 1_000_000


class Traced:
    """An entry and the places where it has been, each with the time of its arrival."""

    def __init__(self, name: str, at: int, expiry: int) -> None:
        self.name = name
        self.at = at
        self.expiry = expiry
        self.state = "pending"
        self.error = ""
        self.entry: Any = None
        self.path: list[dict[str, Any]] = []

    def follow(self, wheel: Any, now: int) -> str:
        """Add the entry's place to its path if it has moved; return how it moved, or ""."""
        place = wheel.where(self.entry)
        if place is None:
            return ""
        level, slot = place
        before = self.path[-1] if self.path else None
        if before is not None and (before["level"], before["slot"]) == (level, slot):
            return ""
        self.path.append({"at": now, "level": level, "slot": slot})
        if before is None:
            return "buffered" if level == 0 else "placed"
        return "handed over" if before["level"] == 0 else "demoted"

    def show(self, wheel: Any, now: int) -> dict[str, Any]:
        place = wheel.where(self.entry) if self.entry is not None else None
        return {
            "name": self.name,
            "at": self.at,
            "expiry": self.expiry,
            "left": max(0, self.expiry - now) if place else 0,
            "state": self.state,
            "level": place[0] if place else None,
            "slot": place[1] if place else None,
            "rounds": getattr(self.entry, "rounds", 0) if place else 0,
            "error": self.error,
            "path": list(self.path),
        }


class WheelScene:
    """A wheel of any kind, and a script that adds, cancels and moves entries."""

    verbs: ClassVar[dict[str, Kinds]] = {"add": (int,), "cancel": (int,), "move": (int, int)}

    def __init__(self, kind: str, script: Sequence[Action], options: dict[str, str]) -> None:
        self.at = number("at", options.pop("at", "0"))
        self.tick = option(options, "tick", 1, 1, LONGEST_TICK)
        self.wheel: Any = self._build(kind, options)
        check_empty(options)
        self._script = script
        self._turns = Turns()
        self._entries: list[Traced] = []
        self._events: list[dict[str, Any]] = []
        self._wakeups: list[int] = []
        self._moments: list[int] = []

    def _build(self, kind: str, options: dict[str, str]) -> Any:
        if kind != "wheel":
            size = option(options, "size", 20, 2, 64)
            made = tickwheel.SimpleWheel if kind == "simple" else tickwheel.RoundsWheel
            return made(tick=self.tick, size=size)
        pointers = choice(options, "pointers", "own", "pushed")
        overflow = choice(options, "overflow", "no", "memory") == "memory"
        sizes = options.pop("sizes", "")
        if not sizes:
            if overflow:
                raise ValueError("overflow=memory needs sizes, for example sizes=8.8.8")
            size = option(options, "size", 20, 2, 64)
            return tickwheel.Wheel(tick=self.tick, size=size, pointers=pointers)
        parts = tuple(number("a size", part, 2, 64) for part in sizes.split("."))
        if len(parts) > MAX_LEVELS:
            raise ValueError(f"a wheel may have {MAX_LEVELS} levels here, got {len(parts)}")
        buffer = tickwheel.MemoryBuffer() if overflow else None
        return tickwheel.Wheel(tick=self.tick, sizes=parts, overflow=buffer, pointers=pointers)

    def show(self) -> dict[str, Any]:
        """Play the script up to `at`, describe the state, then play on to find the last moment."""
        rest = self._play(self._script, self.at)
        self._advance(self.at)
        state = self._state()
        self._play(rest, None)
        return {**state, "moments": sorted(set(self._moments))}

    def _play(self, script: Sequence[Action], until: int | None) -> Sequence[Action]:
        """Wake and act in the order of time, up to `until`; return the actions after it."""
        script = list(script)
        while True:
            self._turns.take()
            wakeup = self.wheel.next_wakeup()
            times = [
                time for time in (wakeup, script[0].at if script else None) if time is not None
            ]
            if not times or (until is not None and min(times) > until):
                return script
            self._moments.append(min(times))
            if wakeup is not None and wakeup <= min(times):
                self._wake(wakeup)
            else:
                self._act(script.pop(0))

    def _wake(self, now: int) -> None:
        if not self._wakeups or self._wakeups[-1] != now:
            self._wakeups.append(now)
        self._advance(now)

    def _advance(self, now: int) -> None:
        if now < self.wheel.now:
            return
        for traced in self.wheel.advance(now):
            traced.state = "fired"
            self._log(now, "fired", traced)
        for traced in self._entries:
            if traced.state == "pending" and (how := traced.follow(self.wheel, now)):
                self._log(now, how, traced)

    def _act(self, action: Action) -> None:
        self._advance(action.at)
        if action.verb == "add":
            self._add(action.at, int(action.arguments[0]))
            return
        wanted = int(action.arguments[0])
        if not 1 <= wanted <= len(self._entries):
            raise ValueError(f"{action.verb} names entry {wanted} of {len(self._entries)}")
        traced = self._entries[wanted - 1]
        if action.verb == "cancel":
            self._cancel(action.at, traced)
        else:
            self._move(action.at, traced, int(action.arguments[1]))

    def _add(self, now: int, delay: int) -> None:
        traced = Traced(name_of(len(self._entries)), now, now + delay)
        self._entries.append(traced)
        try:
            traced.entry = self.wheel.schedule(now + delay, traced)
        except tickwheel.OutOfRange as error:
            traced.state, traced.error = "refused", str(error)
            self._log(now, "refused", traced)
            return
        self._log(now, traced.follow(self.wheel, now), traced)

    def _cancel(self, now: int, traced: Traced) -> None:
        if traced.state == "pending" and traced.entry.cancel():
            traced.state = "cancelled"
            self._log(now, "cancelled", traced)

    def _move(self, now: int, traced: Traced, delay: int) -> None:
        if traced.state != "pending":
            return
        try:
            traced.entry.reschedule(now + delay)
        except tickwheel.OutOfRange as error:
            traced.error = str(error)
            return
        traced.expiry = now + delay
        if traced.follow(self.wheel, now):
            self._log(now, "moved", traced)

    def _log(self, now: int, what: str, traced: Traced) -> None:
        place = traced.path[-1] if traced.path and what not in ("fired", "cancelled") else {}
        self._events.append(
            {
                "at": now,
                "what": what,
                "entry": traced.name,
                "level": place.get("level"),
                "slot": place.get("slot"),
            }
        )

    def _state(self) -> dict[str, Any]:
        ticks = self.at // self.tick
        not_empty = sum(at > 0 for at in self._wakeups)  # no tick is at 0
        levels = self.wheel.snapshot()
        return {
            "now": self.at,
            "tick": self.tick,
            "levels": [{**level, "starts": starts_of(level, self.at)} for level in levels],
            "entries": [traced.show(self.wheel, self.at) for traced in self._entries],
            "buffered": sum(
                1 for traced in self._entries
                if traced.state == "pending" and traced.path[-1]["level"] == 0
            ),
            "pending": len(self.wheel),
            "visits": self.wheel.visits,
            "wasted": getattr(self.wheel, "wasted", None),
            "next": self.wheel.next_wakeup(),
            "events": list(self._events),
            "drivers": {
                "precise": {"wakeups": len(self._wakeups), "empty": 0},
                "ticking": {"wakeups": ticks, "empty": ticks - not_empty},
            },
        }  # fmt: skip


def starts_of(level: dict[str, Any], now: int) -> list[int]:
    """Return the time at which each slot's span begins, of the turn that its entries wait for.

    On a higher level the slot under the pointer holds the same span of the next turn.
    """
    tick, size, pointer = level["tick"], level["size"], level["pointer"]
    index = now // tick
    first = 0 if level["level"] == 1 else 1
    return [(index + (slot - pointer - first) % size + first) * tick for slot in range(size)]


def name_of(number: int) -> str:
    """Return A to Z, then A2 to Z2 and so on."""
    letter, turn = chr(ord("A") + number % 26), number // 26
    return letter if not turn else f"{letter}{turn + 1}"

"""The scene of the idle ring: users send packets, and whoever is silent is reported.

The tracker's keys are on a wheel. A touch stamps a key and leaves it in its slot; when the slot is
due, the stamp decides whether the key is idle or placed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from tickwheel.ring import IdleRing
from tickwheel.scenes.script import check_empty, number, option
from tickwheel.scenes.wheels import starts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tickwheel.scenes.script import Action, Kinds

MAX_SECONDS = 3_600


class IdleScene:
    """Users who send packets, and the seconds after which a silent one is offline."""

    verbs: ClassVar[dict[str, Kinds]] = {"packet": (str,), "leave": (str,)}

    def __init__(self, kind: str, script: Sequence[Action], options: dict[str, str]) -> None:
        self.at = number("at", options.pop("at", "0"), 0, MAX_SECONDS)
        self.timeout = option(options, "timeout", 30, 1, 600)
        check_empty(options)
        self._script = script
        self._ring = IdleRing(self.timeout, 1, None, by_hand=True)
        self._packets = self._scanned = 0
        self._seen: dict[str, int] = {}
        self._offline: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []
        self._moments: list[int] = []

    def show(self) -> dict[str, Any]:
        """Play the script second by second up to `at`, and describe the state."""
        rest = self._play(list(self._script), self.at)
        state = self._state()
        end = max([self.at, *(action.at for action in rest)]) + self.timeout
        self._play(rest, min(end, MAX_SECONDS))
        return {**state, "moments": sorted(set(self._moments))}

    def _play(self, script: list[Action], until: int) -> list[Action]:
        for now in range(self._ring._wheel.now, until + 1):
            self._scanned += len(self._ring)
            for user in self._ring._expire(now):
                self._offline[user] = now
                self._log(now, "offline", user)
            while script and script[0].at <= now:
                self._act(script.pop(0))
        return script

    def _act(self, action: Action) -> None:
        user = str(action.arguments[0])
        if action.verb == "leave":
            self._ring.discard(user)
            self._seen.pop(user, None)
            self._log(action.at, "left", user)
            return
        known = user in self._ring
        self._ring.touch(user)
        self._packets += 1
        self._seen[user] = action.at
        self._offline.pop(user, None)
        self._log(action.at, "stamped" if known else "placed", user)

    def _log(self, now: int, what: str, user: str) -> None:
        self._moments.append(now)
        self._events.append({"at": now, "what": what, "entry": user})

    def _user(self, name: str, seen: int) -> dict[str, Any]:
        entry = self._ring._entries.get(name)
        level, slot = self._ring._wheel.where(entry) or (None, None) if entry else (None, None)
        return {
            "name": name,
            "seen": seen,
            "state": "online" if entry else "offline",
            "offline_at": self._offline.get(name),
            "level": level,
            "slot": slot,
        }

    def _state(self) -> dict[str, Any]:
        wheel = self._ring._wheel
        return {
            "now": self.at,
            "tick": 1,
            "timeout": self.timeout,
            "levels": [{**one, "starts": starts_of(one, self.at)} for one in wheel.snapshot()],
            "entries": [self._user(name, seen) for name, seen in self._seen.items()],
            "events": list(self._events),
            "counts": {
                "packets": self._packets,
                "keys visited by the ring": wheel.visits,
                "keys visited by a scan each second": self._scanned,
            },
        }

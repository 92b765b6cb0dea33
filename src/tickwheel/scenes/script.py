"""The script of a scene, as text: `0:add:350,300:cancel:1` is two actions, at 0 and at 300.

An action is a time, a verb and its arguments. Also reads the other options of a scene, which are
text as well.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_ACTIONS = 60
MAX_TIME = 10_000_000
MAX_TURNS = 2_000  # of one scene: bounds its time, and so its events and its memory
NUMBER = re.compile("[0-9]{1,12}")
WORD = re.compile("[A-Za-z0-9_-]{1,20}")


class Action(NamedTuple):
    """What happens at a time: a verb and its arguments, integers or words."""

    at: int
    verb: str
    arguments: tuple[int | str, ...]


Kinds = tuple[type, ...]


class Turns:
    """Counts the turns of a scene's loop; whatever the script, the loop ends."""

    def __init__(self) -> None:
        self._taken = 0

    def take(self) -> None:
        """Count a turn; raise ValueError if the scene has had all of its turns."""
        self._taken += 1
        if self._taken > MAX_TURNS:
            raise ValueError(
                f"this scene has over {MAX_TURNS} wake-ups: use shorter delays or more slots"
            )


def parse_script(text: str, verbs: Mapping[str, Kinds]) -> list[Action]:
    """Return the actions by time, then in the order given; `verbs` has the arguments of each."""
    parts = text.split(",") if text else []
    if len(parts) > MAX_ACTIONS:
        raise ValueError(f"a script may have {MAX_ACTIONS} actions, this one has {len(parts)}")
    return sorted((_action(part, verbs) for part in parts), key=lambda action: action.at)


def _action(text: str, verbs: Mapping[str, Kinds]) -> Action:
    at, *rest = text.split(":")
    verb, given = (rest[0], rest[1:]) if rest else ("", [])
    kinds = verbs.get(verb)
    if kinds is None or len(given) != len(kinds):
        forms = " or ".join(":".join(["TIME", name, *map(_form, verbs[name])]) for name in verbs)
        raise ValueError(f"an action must be {forms}, got {text!r:.100}")
    arguments = [_argument(value, kind) for value, kind in zip(given, kinds, strict=True)]
    return Action(number("the time of an action", at), verb, tuple(arguments))


def _form(kind: type) -> str:
    return "NUMBER" if kind is int else "NAME"


def _argument(value: str, kind: type) -> int | str:
    if kind is int:
        return number("a number of an action", value)
    if not WORD.fullmatch(value):
        raise ValueError(f"a name must be 1 to 20 letters or digits, got {value!r:.100}")
    return value


def number(what: str, text: str, least: int = 0, most: int = MAX_TIME) -> int:
    """Return an integer; `what` names it in the message."""
    if not NUMBER.fullmatch(text) or not least <= int(text) <= most:
        raise ValueError(f"{what} must be a whole number from {least} to {most}, got {text!r:.100}")
    return int(text)


def option(options: dict[str, str], name: str, default: int, least: int, most: int) -> int:
    """Remove an option and return its number, or the default."""
    return number(name, options.pop(name, str(default)), least, most)


def choice(options: dict[str, str], name: str, *values: str) -> str:
    """Remove an option and return its value; the default is the first of `values`."""
    value = options.pop(name, values[0])
    if value not in values:
        raise ValueError(f"{name} must be {' or '.join(values)}, got {value!r:.100}")
    return value


def check_empty(options: Mapping[str, str]) -> None:
    """Raise if an option is left: no part of the scene has read it."""
    if options:
        raise ValueError(f"this scene has no option {next(iter(options))!r:.100}")

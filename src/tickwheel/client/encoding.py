"""How arguments are written as the API has them, and how its answers are read. No network."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

from tickwheel.client.json import written
from tickwheel.client.values import Document, Page, Verdict
from tickwheel.values.outcome import milliseconds
from tickwheel.values.task import State, at
from tickwheel.values.times import moment_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

Seconds = float | timedelta


def due(delay: Seconds | None, at: datetime | None) -> dict[str, object]:
    """Return when a task is due, as the API has it."""
    if delay is not None and at is not None:
        raise ValueError(f"give delay or at, not both: got delay={delay!r} and at={at!r}")
    if at is not None:
        return {"due_at": stamp("at", at)}
    if delay is not None:
        milliseconds("delay", delay)  # raises for what is no span of time
    return {"delay": delay}


def stamp(name: str, moment: datetime) -> str:
    """Return an aware datetime as the API has it: UTC, in milliseconds, rounded up."""
    text = at(moment_ms(name, moment)).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def stamp_or_none(name: str, moment: datetime | None) -> str | None:
    """Return a time that may be missing as the API has it."""
    return None if moment is None else stamp(name, moment)


def state_or_none(state: State | str | None) -> State | None:
    """Return a state, by its name or not; ValueError names those that there are."""
    if state is None:
        return None
    try:
        return State(state)
    except ValueError:
        raise ValueError(f"state must be one of {[*map(str, State)]}, got {state!r:.100}") from None


def given(options: Mapping[str, object]) -> bytes:
    """Return as JSON what was given: None is the server's default, everywhere in this API."""
    return written({name: value for name, value in options.items() if value is not None})


def asked(path: str, query: Mapping[str, object]) -> str:
    """Return a path with what was given as its query."""
    words = {name: str(value) for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(words)}"


def segment(name: str) -> str:
    """Return a name or an id as one segment of a path."""
    if not isinstance(name, str):
        raise TypeError(f"a name or id must be a str, got {name!r:.100} ({type(name).__name__})")
    if name in ("", ".", ".."):  # another path than meant
        raise ValueError(f"{name!r} is no name and no id")
    return quote(name, safe="")


def all_of(read: Callable[[Document], T]) -> Callable[[Any], list[T]]:
    """Return a reader of a list that comes whole."""
    return lambda answer: [read(item) for item in answer["items"]]


def page_of(read: Callable[[Document], T]) -> Callable[[Any], Page[T]]:
    """Return a reader of a part of a list."""

    def page(answer: Any) -> Page[T]:
        cursor = answer.get("next_cursor")
        return Page(
            [read(item) for item in answer["items"]], None if cursor is None else str(cursor)
        )

    return page


def verdict_on(task_id: str) -> Callable[[Any], Verdict]:
    """Return a reader of who won."""
    return lambda answer: Verdict(task_id, bool(answer["won"]), State(answer["state"]))


def document(answer: Any) -> Document:
    """Read any JSON object."""
    if not isinstance(answer, dict):
        raise TypeError(f"an object was to come, got a {type(answer).__name__}")
    return answer


def nothing(_: Any) -> None:
    """Read an answer that says nothing but that it is done."""

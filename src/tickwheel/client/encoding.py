"""Encode arguments for the API, and read its answers. No network."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlencode

from tickwheel.client.json import encode_object
from tickwheel.client.values import Document, Page, Verdict
from tickwheel.values.outcome import milliseconds
from tickwheel.values.task import State, datetime_of
from tickwheel.values.times import moment_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

Seconds = float | timedelta


def due_fields(delay: Seconds | None, at: datetime | None) -> dict[str, object]:
    """Return the API's fields for a task's due time."""
    if delay is not None and at is not None:
        raise ValueError(f"give delay or at, not both: got delay={delay!r} and at={at!r}")
    if at is not None:
        return {"due_at": format_time("at", at)}
    if delay is not None:
        milliseconds("delay", delay)  # raises for an invalid time span
    return {"delay": delay}


def format_time(name: str, moment: datetime) -> str:
    """Return an aware datetime as the API writes it: UTC, in milliseconds, rounded up."""
    text = datetime_of(moment_ms(name, moment)).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def format_time_or_none(name: str, moment: datetime | None) -> str | None:
    """Return an optional time as the API writes it."""
    return None if moment is None else format_time(name, moment)


def state_or_none(state: State | str | None) -> State | None:
    """Return an optional state, given as `State` or by name."""
    if state is None:
        return None
    try:
        return State(state)
    except ValueError:
        raise ValueError(f"state must be one of {[*map(str, State)]}, got {state!r:.100}") from None


def encode_given(options: Mapping[str, object]) -> bytes:
    """Return options as JSON, without None, which means the server's default in this API."""
    return encode_object({name: value for name, value in options.items() if value is not None})


def path_with_query(path: str, query: Mapping[str, object]) -> str:
    """Return a path with a query of the parameters that are not None."""
    words = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(words, doseq=True)}"  # a list is given once for each item


def path_segment(name: str) -> str:
    """Return a name or an id as one path segment."""
    if not isinstance(name, str):
        raise TypeError(f"a name or id must be a str, got {name!r:.100} ({type(name).__name__})")
    if name in ("", ".", ".."):  # these would address another path
        raise ValueError(f"{name!r} is not a name or an id")
    return quote(name, safe="")


def list_reader(read: Callable[[Document], T]) -> Callable[[Any], list[T]]:
    """Return a reader for a complete list."""
    return lambda answer: [read(item) for item in answer["items"]]


def page_reader(read: Callable[[Document], T]) -> Callable[[Any], Page[T]]:
    """Return a reader for one page of a list."""

    def page(answer: Any) -> Page[T]:
        cursor = answer.get("next_cursor")
        return Page(
            [read(item) for item in answer["items"]], None if cursor is None else str(cursor)
        )

    return page


def verdict_reader(task_id: str) -> Callable[[Any], Verdict]:
    """Return a reader for the verdict on a cancel, a reschedule or feedback."""
    return lambda answer: Verdict(task_id, bool(answer["won"]), State(answer["state"]))


def read_document(answer: Any) -> Document:
    """Read any JSON object."""
    if not isinstance(answer, dict):
        raise TypeError(f"the answer must be a JSON object, got a {type(answer).__name__}")
    return answer


def read_nothing(_: Any) -> None:
    """Ignore the body of an answer."""

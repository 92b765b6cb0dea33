"""The tasks of a batch, still as bytes, found in its body one after the other. Pure.

Finding one costs some milliseconds for each MiB that it has, whatever its bytes are. Whether it is
a task is found out when it is read.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    Body = bytes | bytearray

WHOLE_BYTES = 262_144  # a smaller array is decoded at once
FIRST_BYTES = 8_192  # of an element that the decoder refuses: looked at first, then ever more
GROWTH = 8
SPACE = b" \t\r\n"
TRUNCATED = "Input data was truncated"  # as the decoder calls it

_array = msgspec.json.Decoder(list[msgspec.Raw])
_one = msgspec.json.Decoder(msgspec.Raw)
_BEHIND = re.compile(r"trailing characters \(byte (\d+)\)")
_BYTE = re.compile(r"\(byte (\d+)\)")
_SPACES = re.compile(rb"[ \t\r\n]*+")


class Malformed(ValueError):
    """The body is not a JSON array; the message says why."""

    code = "bad_request"


class NoArray(Malformed):
    """The body is another kind of JSON."""

    code = "invalid"


class TooLong(Malformed):
    """The body has an element of more bytes than allowed, or more lines."""

    code = "too_large"


def elements(body: Body, longest: int) -> Iterator[Any]:
    """Give each element of a JSON array; raise `Malformed` where it cannot be one.

    An element may have `longest` bytes: `TooLong`. One with a lone surrogate is given as well.
    """
    if len(body) <= WHOLE_BYTES:
        try:
            found = _array.decode(body)
        except (msgspec.DecodeError, RecursionError):
            pass  # see which element is wrong
        else:
            yield from found
            return
    at = spaces_end(body, 0, longest)
    if body[at : at + 1] != b"[":
        element_end(body, at, longest)
        raise NoArray("a batch must be an array of tasks")
    at = spaces_end(body, at + 1, longest)
    end = at
    if body[at : at + 1] != b"]":
        end = element_end(body, at, longest)
        yield body[at:end].strip(SPACE)
    while body[end : end + 1] == b",":
        at = end + 1
        end = element_end(body, at, longest)
        yield body[at:end].strip(SPACE)
    if body[end : end + 1] != b"]" or spaces_end(body, end + 1, longest) < len(body):
        raise Malformed(f"the array does not end at byte {end}")


def element_end(body: Body, start: int, longest: int) -> int:
    """Return the index behind an element and the white space that follows it."""
    window = memoryview(body)[start : start + longest]
    try:
        return start + decoded_end(window)
    except msgspec.DecodeError:
        size = FIRST_BYTES  # it may have a lone surrogate, which the decoder does not pass over
    while True:
        try:
            end = decoded_end(without_surrogates(window[:size]))
        except msgspec.DecodeError as error:
            if size >= len(window):
                if start + longest < len(body) and str(error) == TRUNCATED:
                    raise TooLong(f"a task has over {longest} bytes") from None
                raise Malformed(f"it is no JSON: {shifted(error, start)}") from None
        else:
            if end < size or size >= len(window):
                return start + end
        size *= GROWTH


def decoded_end(text: bytes | memoryview) -> int:
    """Return how many bytes the JSON value has with which a text begins."""
    try:
        _one.decode(text)
    except RecursionError:
        raise Malformed("it is nested too deep") from None
    except msgspec.DecodeError as error:
        behind = _BEHIND.search(str(error))
        if behind is None:
            raise
        return int(behind[1]) - 1  # it counts from 1
    return len(text)


def without_surrogates(text: memoryview) -> bytes:
    r"""Return a text of the same length and structure that has no escape such as `\ud800`."""
    return bytes(text).replace(rb"\u", rb"\/")


def shifted(error: msgspec.DecodeError, start: int) -> str:
    """Return what the decoder says, with positions in the body of which it saw a part."""
    text = str(error).removeprefix("JSON is malformed: ")
    return _BYTE.sub(lambda found: f"(byte {start + int(found[1])})", text)


def spaces_end(body: Body, start: int, longest: int) -> int:
    """Return where the white space ends that begins here, of which `longest` bytes are allowed."""
    found = _SPACES.match(body, start, start + longest)
    return start if found is None else found.end()


def lines(body: Body, longest: int, most: int) -> Iterator[Any]:
    """Give each line without the white space around it; empty for a blank one.

    Of a line that is longer than `longest`, a byte more is given. There may be `most` lines:
    `TooLong`.
    """
    start = 0
    for _ in range(most):
        end = body.find(b"\n", start)
        if end < 0:
            end = len(body)
        line = body[start : min(end, start + longest + 1)]
        yield line if len(line) > longest else line.strip(SPACE)
        start = end + 1
        if start >= len(body):
            return
    raise TooLong(f"it has over {most} lines")

"""Splits the body of a batch into its tasks, each still as bytes. Pure.

Splitting costs some milliseconds per MiB, whatever the bytes are. Whether an element is a valid
task is found out later, when it is decoded.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    Body = bytes | bytearray

WHOLE_ARRAY_BYTES = 262_144  # an array up to this size is decoded in one call
FIRST_WINDOW_BYTES = 8_192  # of an element that the decoder rejects, examined in growing windows
WINDOW_GROWTH = 8
LINES_WINDOW_BYTES = 65_536  # of whole lines that are split at once
WHITESPACE = b" \t\r\n"
TRUNCATED = "Input data was truncated"  # the decoder's message

_array = msgspec.json.Decoder(list[msgspec.Raw])
_one = msgspec.json.Decoder(msgspec.Raw)
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_BYTE = re.compile(r"\(byte (\d+)\)")
_SPACES = re.compile(rb"[ \t\r\n]*+")


class Malformed(ValueError):
    """The body is not a JSON array; the message says why."""

    code = "bad_request"


class NotAnArray(Malformed):
    """The body is JSON of another type."""

    code = "invalid"


class TooLong(Malformed):
    """An element has more bytes than allowed, or the body has more lines than allowed."""

    code = "too_large"


def elements(body: Body, max_bytes: int) -> Iterator[Any]:
    """Yield each element of a JSON array; raise `Malformed` where the array is invalid.

    An element of more than `max_bytes` raises `TooLong`. One with a lone surrogate is yielded, too.
    """
    if len(body) <= WHOLE_ARRAY_BYTES:
        try:
            found = _array.decode(body)
        except (msgspec.DecodeError, RecursionError):
            pass  # the code below finds the element that is wrong
        else:
            yield from found
            return
    at = skip_whitespace(body, 0, max_bytes)
    if body[at : at + 1] != b"[":
        element_end(body, at, max_bytes)
        raise NotAnArray("a batch must be an array of tasks")
    at = skip_whitespace(body, at + 1, max_bytes)
    end = at
    if body[at : at + 1] != b"]":
        end = element_end(body, at, max_bytes)
        yield body[at:end].strip(WHITESPACE)
    while body[end : end + 1] == b",":
        at = end + 1
        end = element_end(body, at, max_bytes)
        yield body[at:end].strip(WHITESPACE)
    if body[end : end + 1] != b"]" or skip_whitespace(body, end + 1, max_bytes) < len(body):
        raise Malformed(f"the array does not end at byte {end}")


def element_end(body: Body, start: int, max_bytes: int) -> int:
    """Return the index after an element and the white space that follows it."""
    window = memoryview(body)[start : start + max_bytes]
    try:
        return start + value_length(window)
    except msgspec.DecodeError:
        size = FIRST_WINDOW_BYTES  # it may have a lone surrogate, at which the decoder stops
    while True:
        try:
            end = value_length(mask_escapes(window[:size]))
        except msgspec.DecodeError as error:
            if size >= len(window):
                if start + max_bytes < len(body) and str(error) == TRUNCATED:
                    raise TooLong(f"a task has over {max_bytes} bytes") from None
                raise Malformed(f"it is not JSON: {decoder_message(error, start)}") from None
        else:
            if end < size or size >= len(window):
                return start + end
        size *= WINDOW_GROWTH


def value_length(text: bytes | memoryview) -> int:
    """Return the length of the JSON value at the beginning of a text."""
    try:
        _one.decode(text)
    except RecursionError:
        raise Malformed("it is nested too deeply") from None
    except msgspec.DecodeError as error:
        trailing = _TRAILING.search(str(error))
        if trailing is None:
            raise
        return int(trailing[1]) - 1  # the decoder counts from 1
    return len(text)


def mask_escapes(text: memoryview) -> bytes:
    r"""Return a text of the same length and structure, without escapes such as `\ud800`."""
    return bytes(text).replace(rb"\u", rb"\/")


def decoder_message(error: msgspec.DecodeError, start: int) -> str:
    """Return the decoder's message, with positions in the whole body; it saw it from `start`."""
    text = str(error).removeprefix("JSON is malformed: ")
    return _BYTE.sub(lambda found: f"(byte {start + int(found[1])})", text)


def skip_whitespace(body: Body, start: int, max_bytes: int) -> int:
    """Return the end of the white space that begins at `start`, at most `max_bytes` later."""
    found = _SPACES.match(body, start, start + max_bytes)
    return start if found is None else found.end()


def lines(body: Body, max_bytes: int, max_lines: int) -> Iterator[bytes]:
    """Yield each line without the white space around it; a blank one is empty.

    A line of more than `max_bytes` is cut after one byte more. More than `max_lines` lines raise
    `TooLong`.
    """
    start = count = 0
    while start < len(body):
        end = body.rfind(b"\n", start, start + LINES_WINDOW_BYTES)
        if end < 0:  # the last line, or a long one
            end = body.find(b"\n", start)
        if end < 0:
            end = len(body)
        window = body[start : min(end, start + max(LINES_WINDOW_BYTES, max_bytes + 1))]
        found = bytes(window).split(b"\n")
        count += len(found)
        if count > max_lines:
            raise TooLong(f"it has over {max_lines} lines")
        for line in found:
            yield line[: max_bytes + 1] if len(line) > max_bytes else line.strip(WHITESPACE)
        start = end + 1

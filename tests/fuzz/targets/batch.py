"""Batches: their parser and a JSON decoder find the same tasks, wherever a window ends."""

import json
from unittest import mock

from fuzz.source import Source
from model import answer
from tickwheel.web import batch_parser
from tickwheel.web.batch_parser import elements, lines

MOST_BYTES = 10_000
SMALL = {
    "WHOLE_ARRAY_BYTES": -1, "FIRST_WINDOW_BYTES": 2, "WINDOW_GROWTH": 2, "LINES_WINDOW_BYTES": 3
}  # fmt: skip


def no_constant(name):
    raise ValueError(name)


def values_of(body):
    """Return the JSON value of a body, or None: no element of a batch is None here."""
    try:
        return json.loads(body.decode(), parse_constant=no_constant)
    except (ValueError, RecursionError):
        return None


def split(body):
    return [bytes(one) for one in elements(body, MOST_BYTES)]


def run(data):
    source = Source(data)
    as_lines = source.pick((False, True))
    body = source.rest()
    if as_lines:
        wanted = [line.strip(b" \t\r\n") for line in body.removesuffix(b"\n").split(b"\n")]
        with mock.patch.multiple(batch_parser, **SMALL):
            found = list(lines(body, MOST_BYTES, len(wanted)))
        assert found == list(lines(body, MOST_BYTES, len(wanted))) == (wanted if body else [])
        return
    whole = answer(split, body)
    with mock.patch.multiple(batch_parser, **SMALL):
        windows = answer(split, body)
    assert whole == windows, f"at once {whole}, in windows {windows}"
    wanted = values_of(body)
    if isinstance(whole, tuple):
        assert issubclass(whole[0], batch_parser.Malformed), whole
        assert not isinstance(wanted, list) or "deep" in whole[1], whole
        return
    found = [values_of(one) for one in whole]
    if isinstance(wanted, list):
        assert found == wanted
    elif wanted is not None or None not in found:
        raise AssertionError(f"{found} is not in {wanted}")

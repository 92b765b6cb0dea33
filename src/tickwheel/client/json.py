"""`Json`: a text that already is JSON, and is sent unchanged."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tickwheel.values.json.encode import encode


@dataclass(frozen=True, slots=True)
class Json:
    """A payload or result that already is JSON: sent unchanged, byte for byte.

    Use it to keep what Python's encoder would change: digits (`1.10`, `1e400`), spaces, duplicate
    keys. Raises ValueError, with the position, for a text that is not JSON.
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"Json takes a str, got a {type(self.text).__name__}")
        try:
            _CHECKER.decode(self.text)
            self.text.encode()
        except json.JSONDecodeError as error:
            place = f"line {error.lineno} column {error.colno} (character {error.pos})"
            raise ValueError(f"not JSON: {error.msg} at {place}") from None
        except UnicodeEncodeError as error:
            text = f"not JSON: a lone surrogate at character {error.start}"
            raise ValueError(text) from None
        except RecursionError:
            raise ValueError("this JSON is nested too deeply") from None

    def __repr__(self) -> str:
        return f"Json({self.text!r:.100})"


def refuse_constant(constant: str) -> None:
    """Refuse NaN and Infinity, which Python's parser accepts and JSON does not have."""
    raise ValueError(f"not JSON: {constant}")


# Numbers stay text: a number of ten thousand digits is JSON, too.
_CHECKER = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=refuse_constant)


def encode_object(options: dict[str, object]) -> bytes:
    """Return an object as JSON; a `Json` value in it is written unchanged."""
    texts = {name: value.text for name, value in options.items() if isinstance(value, Json)}
    if not texts:
        return encode(options)
    rest = encode({name: value for name, value in options.items() if name not in texts})
    parts = [rest[1:-1]] if len(rest) > 2 else []
    parts += [encode(name) + b":" + text.encode() for name, text in texts.items()]
    return b"{" + b",".join(parts) + b"}"

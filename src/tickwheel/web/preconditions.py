"""If-Match and If-None-Match: a change that requires a version of what it changes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tickwheel.web.problems import HttpError

if TYPE_CHECKING:
    from tickwheel.errors import TickwheelError
    from tickwheel.web.route import Call

ETAG = re.compile(rb'"[!#-~]*"')


def required_version(
    call: Call, what: str, found: str | None, changed: type[TickwheelError]
) -> str | None:
    """Return the version that a change requires; None: any, "": the thing must not exist.

    `found` is the stored version, or None; `changed` is raised if If-Match has another one.
    """
    match, none_match = call.headers.get(b"if-match"), call.headers.get(b"if-none-match")
    if none_match is not None:
        if none_match.strip() != b"*" or match is not None:
            raise HttpError("bad_request", "If-None-Match must be *, and without If-Match")
        return ""
    if match is None:
        return None
    # A proxy that compresses turns an ETag into a weak one, of the same version.
    tags = [tag.strip().removeprefix(b"W/") for tag in match.split(b",")]
    if tags != [b"*"] and not all(map(ETAG.fullmatch, tags)):
        raise HttpError("bad_request", f'If-Match must be an ETag of this {what}, such as "3"')
    if found is None or (tags != [b"*"] and f'"{found}"'.encode() not in tags):
        state = "does not exist" if found is None else f"has version {found}"
        name, wanted = call.params["name"], match.decode("latin-1")
        raise changed(f"the {what} {name!r} {state}, but If-Match is {wanted:.100}")
    return found

"""The pages of the dashboard: one HTML document for all of them, and the files that it loads.

The document's base is relative, so every link works under any prefix that a proxy or a mount adds.
Nothing is loaded from elsewhere, and no script or style is inline: the policy forbids both.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from functools import cache
from importlib import resources
from string import Template
from typing import NamedTuple

import msgspec

from tickwheel.web.problems import HttpError
from tickwheel.web.route import Call, Reply, Route, local_path

FOLDER = resources.files("tickwheel.web") / "static"
DOCUMENT = "dashboard.html"
MEDIA = {
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".png": b"image/png",
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    b" connect-src 'self'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
SECURITY = [
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
]
REVALIDATED = (b"cache-control", b"no-cache")  # a new version shows at once


class File(NamedTuple):
    """A file as it is sent."""

    body: bytes
    compressed: bytes
    media: bytes
    etag: bytes


@cache
def file_names() -> frozenset[str]:
    """Return the names of the files that the dashboard loads."""
    return frozenset(path.name for path in FOLDER.iterdir() if suffix_of(path.name) in MEDIA)


@cache  # of the names above only: anyone may ask for others
def file_named(name: str) -> File:
    """Return a file of the dashboard; files do not change while a process runs."""
    body = (FOLDER / name).read_bytes()
    etag = b'"' + hashlib.sha256(body).hexdigest()[:20].encode() + b'"'
    return File(body, gzip.compress(body, mtime=0), MEDIA[suffix_of(name)], etag)


def suffix_of(name: str) -> str:
    """Return the suffix of a file's name, with its dot."""
    return "." + name.rpartition(".")[2]


@cache
def template_named(name: str) -> Template:
    """Return a document without its base; it names all its modules, so they load at once."""
    text = (FOLDER / name).read_text("utf-8")
    modules = re.findall(r'src="static/([^"]+)" type="module"', text)
    for module in modules:  # it grows by what they import
        imports = re.findall(r'from "\./([^"]+)"', (FOLDER / module).read_text("utf-8"))
        modules += [one for one in imports if one not in modules]
    links = "\n".join(f'<link rel="modulepreload" href="static/{one}">' for one in modules)
    return Template(text.replace("</head>", f"{links}\n</head>"))


async def page(call: Call) -> Reply:
    """Return the dashboard; its script reads the address and shows that page."""
    return document(call, DOCUMENT)


def document(call: Call, name: str) -> Reply:
    """Return an HTML document, with a base that fits the request's path."""
    path = local_path(call.scope)
    if not path:  # a mount without the final slash: relative links need it
        target = call.scope["path"].rpartition("/")[2].encode() + b"/"
        return Reply(b"", 308, [(b"location", target)], b"text/plain")
    base = "../" * (path.count("/") - 1) or "./"
    body = template_named(name).substitute(base=base, version=call.app.version).encode()
    headers = [*SECURITY, REVALIDATED]
    return Reply(body, headers=headers, media=b"text/html; charset=utf-8")


async def static(call: Call) -> Reply:
    """Return a file of the dashboard."""
    name = call.params["file"]
    if name not in file_names():
        raise HttpError("not_found", f"there is no file {name!r:.100}")
    found = file_named(name)
    headers = [(b"etag", found.etag), (b"vary", b"accept-encoding"), REVALIDATED, SECURITY[1]]
    if call.headers.get(b"if-none-match", b"").removeprefix(b"W/") == found.etag:
        return Reply(b"", 304, headers, found.media)
    if b"gzip" in call.headers.get(b"accept-encoding", b""):
        return Reply(
            found.compressed, headers=[*headers, (b"content-encoding", b"gzip")], media=found.media
        )
    return Reply(found.body, headers=headers, media=found.media)


PATHS = (
    "", "/", "/tasks", "/tasks/{id}", "/backlog", "/services", "/services/{name}", "/schedules",
    "/schedules/{name}", "/cluster", "/tokens", "/audit", "/sign-in",
)  # fmt: skip
ROUTES = [
    Route("GET", "/static/{file}", static, scope=None, gives={200: msgspec.Raw}),
    *(Route("GET", path, page, scope=None, gives={200: msgspec.Raw}) for path in PATHS),
]

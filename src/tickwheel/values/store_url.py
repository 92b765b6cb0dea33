"""The URL of a store: the only module that knows the schemes of databases.

No message shows a URL that is wrong: any part of it may be a password.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, quote, unquote, urlencode, urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

SQLITE, POSTGRES, MEMORY = "sqlite", "postgres", "memory"
# By scheme.
KINDS = {"sqlite": SQLITE, "postgresql": POSTGRES, "postgres": POSTGRES, "memory": MEMORY}
NO_BRACKETS = str.maketrans("", "", "[]")
SQLITE_FORM = "sqlite:///PATH"
POSTGRES_FORM = "postgresql://USER:PASSWORD@HOST/DATABASE"
MEMORY_URL = "memory://"


def kind_of(url: str) -> str:
    """Return which database a URL names: `SQLITE`, `POSTGRES`, or `MEMORY`, which is for tests."""
    if not isinstance(url, str):
        raise TypeError(f"a store's URL must be a str, got a {type(url).__name__}")
    form = f"a store's URL is {SQLITE_FORM} or {POSTGRES_FORM}"
    try:
        scheme = split_url(url).scheme
    except ValueError:
        raise ValueError(f"{form}; the one given cannot be parsed") from None
    if scheme not in KINDS:
        got = f", got {scheme!r}://" if "://" in url else ""  # else it may be anything
        raise ValueError(f"{form}{got}")
    if scheme == MEMORY and url != MEMORY_URL:
        raise ValueError(f"the URL of a store in memory is {MEMORY_URL}, with nothing after it")
    return KINDS[scheme]


def split_url(url: str) -> SplitResult:
    """Split a URL that may name several hosts.

    `urlsplit` refuses an IPv6 address that is not the first host, in newer releases of Python.
    """
    scheme, colon, rest = url.partition("://")
    hosts = re.match("[^/?#]*", rest)[0]  # type: ignore[index]
    urlsplit("//" + hosts.translate(NO_BRACKETS))  # refuses letters that would become separators
    return urlsplit(f"{scheme}{colon}{rest[len(hosts) :]}")._replace(netloc=hosts)


def sqlite_url(path: Path) -> str:
    """Return the URL of a SQLite file."""
    return f"{SQLITE}:///{quote(str(path))}"


def postgres_url(database: str, user: str, password: str, options: Mapping[str, str]) -> str:
    """Return the URL of a PostgreSQL database; host and port are options."""
    secret = f":{quote(password, safe='')}" if password else ""
    place = f"{quote(user, safe='')}{secret}@" if user else ""
    return f"postgresql://{place}/{quote(database, safe='')}?{urlencode(options, quote_via=quote)}"


def sqlite_path(url: str) -> Path:
    """Return the file of a SQLite URL."""
    path = unquote(urlsplit(url).path[1:])
    if not url.partition(":")[2].startswith("///") or not path.strip("/"):
        raise ValueError(f"a SQLite URL is {SQLITE_FORM}, with three slashes before the path")
    if path == ":memory:":
        raise ValueError(f"a store on SQLite is a file; for tests there is {MEMORY_URL}")
    return Path(path)

"""The URL of a store: which database it names, and what is said about a wrong one."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tickwheel.values.store_url import POSTGRES, SQLITE, kind_of, split_url, sqlite_path


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("sqlite:///tasks.db", SQLITE),
        ("SQLite:////var/tasks.db", SQLITE),
        ("postgresql://h/d", POSTGRES),
        ("postgres://u:p@h:5432/d?schema=s", POSTGRES),
        ("postgresql://one:1,[::1]:2/d", POSTGRES),
    ],
)
def test_the_scheme_names_the_database(url, kind):
    assert kind_of(url) == kind


@pytest.mark.parametrize(
    "url", ["", "tasks.db", "mysql://u:secret@h/d", "http://[secret", "secret"]
)
def test_another_url_is_refused_and_not_shown(url):
    with pytest.raises(ValueError, match=r"sqlite:///PATH or postgresql://") as refused:
        kind_of(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("hosts", ["", "u:p@one", "one:1,[::1]:2", "u@[::1]:1,[::2]"])
@pytest.mark.parametrize("rest", ["", "/d", "?host=a/b", "//d?a=1#b"])
def test_a_url_is_split_whatever_its_hosts_are(hosts, rest):
    expected = urlsplit(f"postgresql://one{rest}")._replace(netloc=hosts)
    assert split_url(f"postgresql://{hosts}{rest}") == expected


def test_a_url_is_a_str():
    with pytest.raises(TypeError, match="must be a str, got a PosixPath"):
        kind_of(Path("tasks.db"))


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///tasks.db", "tasks.db"),
        ("sqlite:////var/a%20b.db", "/var/a b.db"),
    ],
)
def test_the_path_is_behind_three_slashes(url, path):
    assert sqlite_path(url) == Path(path)


@pytest.mark.parametrize(
    "url", ["sqlite:tasks.db", "sqlite://tasks.db", "sqlite:///", "sqlite:////"]
)
def test_a_sqlite_url_without_a_path_is_refused(url):
    with pytest.raises(ValueError, match="three slashes before the path"):
        sqlite_path(url)


def test_a_database_in_memory_is_refused():
    with pytest.raises(ValueError, match="is a file; for tests there is memory://"):
        sqlite_path("sqlite:///:memory:")


def test_the_url_of_a_store_in_memory_has_no_other_part():
    assert kind_of("memory://") == "memory"
    for url in ("memory:", "memory:///tasks.db", "memory://host", "memory://?a=b"):
        with pytest.raises(ValueError, match="is memory://, with nothing after it"):
            kind_of(url)

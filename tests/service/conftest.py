"""Fixtures: real servers and real receivers."""

import pytest

from service.rig import Server, Watcher


@pytest.fixture
def receiver():
    with Watcher() as made:
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server on SQLite for the tests of a module: each has services of its own."""
    directory = tmp_path_factory.mktemp("server")
    with Server(f"sqlite:///{directory}/tasks.db", directory) as made:
        yield made


@pytest.fixture
def make_server(tmp_path):
    """Makes servers with directories of their own, and stops them."""
    made = []

    def make(store, *arguments, **options):
        made.append(Server(store, tmp_path / f"server-{len(made)}", *arguments, **options))
        return made[-1].start()

    yield make
    for each in made:
        if each.process is not None:
            each.__exit__(None)

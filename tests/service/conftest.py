"""Fixtures: real servers and real receivers."""

import pytest

from service.harness import Server, Watcher


@pytest.fixture
def receiver():
    with Watcher() as made:
        yield made


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server on SQLite for all tests of a module; each uses its own services."""
    directory = tmp_path_factory.mktemp("server")
    with Server(f"sqlite:///{directory}/tasks.db", directory) as made:
        yield made


@pytest.fixture
def make_server(tmp_path):
    """Starts servers, each with its own directory, and stops them."""
    made = []

    def make(store, *arguments, **options):
        made.append(Server(store, tmp_path / f"server-{len(made)}", *arguments, **options))
        return made[-1].start()

    yield make
    for each in made:
        if each.process is not None:
            each.__exit__(None)

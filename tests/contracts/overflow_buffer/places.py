"""Where the tests of overflow buffers find a buffer of each kind."""

import pytest

from cores import NAMES
from tickwheel import MemoryBuffer
from tickwheel import overflow_buffers as buffers
from tickwheel.values.json.encode import decode

DURABLE = ["sqlite", "postgres", "redis"]


CLASSES = {"sqlite": "SqliteBuffer", "postgres": "PostgresBuffer", "redis": "RedisBuffer"}


def on_cores(place, *kinds):
    """Both cores on what is near, one on servers: a core does not know which buffer it has."""
    near = {"memory", "sqlite"}
    pairs = [(kind, core) for kind in kinds for core in (NAMES if kind in near else NAMES[-1:])]
    return pytest.mark.parametrize((place, "core"), pairs, indirect=True)


class Place:
    """Somewhere that buffers of one kind are kept."""

    def __init__(self, kind, where=None):
        self.kind = kind
        self.where = where
        self._made = []

    def buffer(self, name="default", **options):
        if self.kind == "memory":
            return MemoryBuffer()
        buffer = getattr(buffers, CLASSES[self.kind])(self.where, name, **options)
        self._made.append(buffer)
        return buffer

    def stored(self, name="default"):
        """Return all that is stored under this name, as pairs of expiry and item."""
        with self.buffer(name) as stranger:
            found = [(row.key.expiry, decode(row.item)) for row in stranger._rows_of_others()]
        return sorted(found, key=lambda pair: (pair[0], repr(pair[1])))

    def close(self):
        for buffer in self._made:
            buffer.close()


def find_place(kind, request):
    if kind == "memory":
        return Place(kind)
    if kind == "sqlite":
        return Place(kind, str(request.getfixturevalue("tmp_path") / "overflow.db"))
    return Place(kind, request.getfixturevalue(f"{kind}_url"))

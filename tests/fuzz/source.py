"""The bytes of a fuzzer, read as choices; after the last byte every choice is the first."""


class Source:
    """Reads bytes from the front. It is true while some are left."""

    def __init__(self, data):
        self._data = data
        self._at = 0

    def __bool__(self):
        return self._at < len(self._data)

    def take(self, count):
        """Return up to `count` bytes."""
        self._at += count
        return self._data[self._at - count : self._at]

    def rest(self):
        """Return all bytes that are left."""
        return self.take(len(self._data))

    def number(self, size=1):
        """Return an unsigned number of `size` bytes."""
        return int.from_bytes(self.take(size))

    def pick(self, choices):
        """Return one of at most 256 choices."""
        return choices[self.number() % len(choices)]

    def chunk(self, size=1):
        """Return bytes with their length in front."""
        return self.take(self.number(size))

    def text(self):
        """Return a text; lone surrogates stand for bytes that are not UTF-8."""
        return self.chunk().decode("utf-8", "surrogateescape")

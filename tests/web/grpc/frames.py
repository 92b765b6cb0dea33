"""HTTP/2 by hand, for peers that no client library would be: they flood, stall, or never read."""

import socket
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY = 0, 1, 4, 6, 7
END_HEADERS, END_STREAM, ACK = 4, 1, 1
INITIAL_WINDOW = 4  # a setting


def frame(kind, flags, stream, body=b""):
    size = struct.pack(">I", len(body))[1:]
    return size + bytes([kind, flags]) + struct.pack(">I", stream) + body


def literal(name, value):
    """A header, without any table or compression."""
    name, value = name.encode(), value.encode()
    return b"\x00" + length(name) + name + length(value) + value


def length(text):
    if len(text) < 127:
        return bytes([len(text)])
    rest, found = len(text) - 127, [127]
    while rest >= 128:
        found.append(rest % 128 + 128)
        rest //= 128
    return bytes([*found, rest])


def request(path, **more):
    """The headers of a call."""
    pairs = {
        ":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost",
        "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    pairs |= {name.replace("_", "-"): value for name, value in more.items()}
    return b"".join(literal(name, value) for name, value in pairs.items())


class Peer:
    """A connection that says what a test wants; with `window` 0 it receives no message at all."""

    def __init__(self, address, window=65_535):
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)))
        self._stream = -1
        settings = struct.pack(">HI", INITIAL_WINDOW, window)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings))

    def call(self, path, message=None, *, end=True, **headers):
        """Begin a call; without a message, or an end, it stays open."""
        self._stream += 2
        whole = frame(HEADERS, END_HEADERS, self._stream, request(path, **headers))
        if message is not None:
            body = b"\x00" + struct.pack(">I", len(message)) + message
            parts = [body[at : at + 16_384] for at in range(0, len(body), 16_384)]
            for part in parts:
                last = END_STREAM if end and part is parts[-1] else 0
                whole += frame(DATA, last, self._stream, part)
        self.socket.sendall(whole)

    def close(self):
        self.socket.close()

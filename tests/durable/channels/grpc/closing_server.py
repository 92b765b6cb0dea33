"""A server of gRPC that refuses the first call on its first connection, since it is closing it."""

import asyncio
import struct

from web.grpc.frames import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PREFACE,
    SETTINGS,
    frame,
    literal,
)

OK = literal(":status", "200") + literal("content-type", "application/grpc")


class ClosingServer:
    """Sends a GOAWAY on the first connection: no call was processed. It answers later ones."""

    def __init__(self):
        self.connections = 0
        self.endpoint = ""
        self._server = None
        self._writers = []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = f"grpc://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader, writer):
        self.connections += 1
        self._writers.append(writer)
        closing = self.connections == 1
        try:
            await reader.readexactly(len(PREFACE))
            writer.write(frame(SETTINGS, 0, 0))
            while True:
                head = await reader.readexactly(9)
                size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                (stream,) = struct.unpack(">I", head[5:])
                await reader.readexactly(size)
                if kind == SETTINGS and not flags & ACK:
                    writer.write(frame(SETTINGS, ACK, 0))
                elif kind == HEADERS and closing:
                    writer.write(frame(GOAWAY, 0, 0, struct.pack(">II", 0, 0)))
                    return
                elif kind == DATA and flags & END_STREAM:
                    writer.write(finished(stream))
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            writer.close()


def finished(stream):
    """The answer of a call: an empty message, and the status OK."""
    ended = END_HEADERS | END_STREAM
    return (
        frame(HEADERS, END_HEADERS, stream, OK)
        + frame(DATA, 0, stream, bytes(5))
        + frame(HEADERS, ended, stream, literal("grpc-status", "0"))
    )

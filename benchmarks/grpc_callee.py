"""A callee over gRPC for the channel benchmark: it answers each call with OK, at once.

python benchmarks/grpc_callee.py PORT
"""

import asyncio
import socket
import sys
from pathlib import Path

import grpc

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from servers import Server
from tickwheel.v1 import callback_pb2, callback_pb2_grpc


class CalleeServer(Server):
    """The process of this callee."""

    name = "callee"

    @property
    def url(self):
        return f"grpc://127.0.0.1:{self.port}"

    def binaries(self):
        return (sys.executable,)

    def argv(self):
        return [sys.executable, __file__, str(self.port)]

    def ready(self):
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True


class Callee(callback_pb2_grpc.CallbackServiceServicer):
    """Answers at once."""

    async def Call(self, request, context):  # noqa: N802 - the name in the proto
        return callback_pb2.CallResponse()


async def serve(port):
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    callback_pb2_grpc.add_CallbackServiceServicer_to_server(Callee(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))

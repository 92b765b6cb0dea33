"""A callee over gRPC: it prints each task that a server calls it for.

    python examples/grpc_callee.py

It listens on grpc://127.0.0.1:50051 (another port: `python examples/grpc_callee.py 50052`). It
finishes a task at once, or accepts it if its payload has `"later": true`; `grpc_client.py` then
reports its end. Needs `pip install 'tickwheel[grpc]'`.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc

from tickwheel.v1 import callback_pb2, callback_pb2_grpc


class Orders(callback_pb2_grpc.CallbackServiceServicer):
    """Expires orders."""

    def Call(self, request, context):  # noqa: N802 - the name in callback.proto
        """Process a due task; raise or abort with a status to have it retried."""
        order = json.loads(request.payload)
        print(f"{request.service}: {order}, attempt {request.attempt}", flush=True)
        if order.get("later"):
            return callback_pb2.CallResponse(accepted=True)
        return callback_pb2.CallResponse(result=json.dumps({"expired": order["id"]}))


def main():
    """Serve until Ctrl-C."""
    server = grpc.server(ThreadPoolExecutor(10))
    callback_pb2_grpc.add_CallbackServiceServicer_to_server(Orders(), server)
    port = server.add_insecure_port(f"127.0.0.1:{sys.argv[1] if len(sys.argv) > 1 else 50051}")
    server.start()
    print(f"listening on grpc://127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()

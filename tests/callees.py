"""A callee over gRPC for the tests: a real server on loopback, whose behaviour a test chooses.

    with Callee() as callee:
        call(callee.endpoint)
        assert callee.requests[0].task_id == ...

It runs on threads of its own, so that it shares nothing with the event loop of the code under test.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from tickwheel.v1 import callback_pb2, callback_pb2_grpc

PATIENCE = 60.0  # seconds until a test that waits here has hung
RUNNING_AT_ONCE = 8


class Callee(callback_pb2_grpc.CallbackServiceServicer):
    """A server of CallbackService.

    - `behave(request, context)` returns the response; it may abort the call.
    - `requests` and `metadata` have what arrived; `interrupted` counts calls that were cancelled.
    """

    def __init__(self, credentials=None, host="127.0.0.1"):
        self.requests = []
        self.metadata = []
        self.remaining = []  # seconds until the deadline of each call
        self.interrupted = 0
        self.behave = finishing()
        self._released = threading.Event()
        self._server = grpc.server(
            ThreadPoolExecutor(RUNNING_AT_ONCE), options=[("grpc.so_reuseport", 0)]
        )
        callback_pb2_grpc.add_CallbackServiceServicer_to_server(self, self._server)
        if credentials is None:
            self.port = self._server.add_insecure_port(f"{host}:0")
        else:
            self.port = self._server.add_secure_port(f"{host}:0", credentials)
        self.endpoint = f"grpc{'s' if credentials else ''}://{host}:{self.port}"

    def Call(self, request, context):  # noqa: N802 - the name in the proto
        hung = self.hangs_now  # an earlier call may end after this has changed
        context.add_callback(lambda: hung and self._ended(context))
        self.metadata.append(dict(context.invocation_metadata()))
        self.remaining.append(context.time_remaining())
        self.requests.append(request)
        return self.behave(request, context)

    def _ended(self, context):
        if context.code() is None and not context.is_active() and self.hangs_now:
            self.interrupted += 1
            self._released.set()

    hangs_now = False

    def hangs(self):
        self.hangs_now = True
        self._released.clear()

        def behave(request, context):
            self._released.wait(PATIENCE)
            return callback_pb2.CallResponse()

        self.behave = behave

    def release(self):
        self.hangs_now = False
        self._released.set()

    def __enter__(self):
        self._server.start()
        return self

    def __exit__(self, *_):
        self.release()
        self._server.stop(0).wait(PATIENCE)


def finishing(result=""):
    return lambda request, context: callback_pb2.CallResponse(result=result)


def accepting(request, context):
    return callback_pb2.CallResponse(accepted=True)


def aborting(code, text="", retry_after=None, details=None):
    """Answer with a status; with `retry_after`, the seconds in its RetryInfo."""

    def behave(request, context):
        if retry_after is not None:
            whole = duration_pb2.Duration()
            whole.FromMilliseconds(round(retry_after * 1000))
            info = any_pb2.Any()
            info.Pack(error_details_pb2.RetryInfo(retry_delay=whole))
            status = status_pb2.Status(code=code.value[0], message=text, details=[info])
            context.set_trailing_metadata([("grpc-status-details-bin", status.SerializeToString())])
        if details is not None:
            context.set_trailing_metadata([("grpc-status-details-bin", details)])
        context.abort(code, text)

    return behave

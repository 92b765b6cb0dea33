"""Batches of the gRPC API: the splitter and protobuf find the same tasks."""

from google.protobuf.message import DecodeError

from tickwheel.v1.tasks_pb2 import SubmitBatchRequest, SubmitRequest
from tickwheel.web.grpc.wire import Malformed, tasks_in


def parsed(kind, data):
    try:
        return kind.FromString(data)
    except DecodeError:
        return None


def run(data):
    whole = parsed(SubmitBatchRequest, data)
    try:
        parts = [parsed(SubmitRequest, part) for part in tasks_in(data)]
    except Malformed:
        # protobuf also accepts unknown fields, and lengths of more bytes than needed.
        assert whole is None or SubmitBatchRequest(tasks=whole.tasks).SerializeToString() != data
        return
    if whole is None:
        assert None in parts
    else:
        assert list(whole.tasks) == parts

"""The messages of the gRPC API as values of the schemas."""

import pytest

from tickwheel.v1 import tasks_pb2 as pb
from tickwheel.web.grpc.messages import feedback_values, submit_values


class ReadOnce:
    """A message whose fields can be listed once, and read by no other way: each read copies."""

    def __init__(self, message, large):
        self._message = message
        self._large = large
        self.lists = 0

    def __getattr__(self, name):
        assert name != self._large
        self.lists += name == "ListFields"
        assert self.lists <= 1
        return getattr(self._message, name)


@pytest.mark.parametrize(("payload", "found"), [("", b"null"), ("[1]", b"[1]")])
def test_the_payload_of_a_submit_is_read_once(payload, found):
    values = submit_values(ReadOnce(pb.SubmitRequest(service="mail", payload=payload), "payload"))
    assert bytes(values["payload"]) == found


@pytest.mark.parametrize(("result", "found"), [("", b"null"), ("[1]", b"[1]")])
def test_the_result_of_a_feedback_is_read_once(result, found):
    request = pb.FeedbackRequest(outcome=pb.OUTCOME_FINISHED, attempt=1, result=result)
    assert bytes(feedback_values(ReadOnce(request, "result"))["result"]) == found

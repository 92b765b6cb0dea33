"""A client over gRPC: it submits tasks, moves and cancels one, watches them, and feeds back.

    python examples/grpc_client.py

Before that, start `examples/grpc_callee.py`, and a server that may call it:

    tickwheel serve --grpc-listen 127.0.0.1:7390 --allow-private-targets
    tickwheel services put expire --protocol grpc --endpoint grpc://127.0.0.1:50051

Another address: `python examples/grpc_client.py HOST:PORT`. With TICKWHEEL_TOKEN in the environment
it sends that token. Needs `pip install 'tickwheel[grpc]'`.
"""

import json
import os
import sys
from datetime import timedelta

import grpc

from tickwheel.v1 import tasks_pb2 as pb
from tickwheel.v1 import tasks_pb2_grpc

TOKEN = os.environ.get("TICKWHEEL_TOKEN")
METADATA = [("authorization", f"Bearer {TOKEN}")] if TOKEN else []


def states(tasks, task_id):
    """Yield each state of a task until its end, and report the end of an accepted attempt."""
    reported = False
    for change in tasks.Watch(pb.WatchRequest(id=task_id), metadata=METADATA):
        task = change.task
        yield pb.State.Name(task.state).removeprefix("STATE_").lower()
        later = json.loads(task.payload).get("later")
        if later and task.state == pb.STATE_RUNNING and not reported:
            reported = True  # a running task changes once more when its callee has accepted it
            finished = pb.FeedbackRequest(
                id=task_id, outcome=pb.OUTCOME_FINISHED, attempt=task.attempt, result='"by hand"'
            )
            tasks.Feedback(finished, metadata=METADATA)


def main():
    """Show each verb once."""
    server = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7390"
    with grpc.insecure_channel(server) as channel:
        tasks = tasks_pb2_grpc.TaskServiceStub(channel)

        def submit(order, delay):
            request = pb.SubmitRequest(
                service="expire", payload=json.dumps(order), delay=timedelta(seconds=delay)
            )
            return tasks.Submit(request, metadata=METADATA).task

        task = submit({"id": "o-1"}, 3600)
        move = pb.RescheduleRequest(id=task.id, delay=timedelta(seconds=0))
        print("o-1 is moved:", tasks.Reschedule(move, metadata=METADATA).won)
        print("o-1 ends as:", [*states(tasks, task.id)][-1])
        result = tasks.Get(pb.GetRequest(id=task.id), metadata=METADATA).task.result
        print("o-1 has the result", result)

        task = submit({"id": "o-2"}, 3600)
        cancel = pb.CancelRequest(id=task.id)
        print("o-2 is cancelled:", tasks.Cancel(cancel, metadata=METADATA).won)

        task = submit({"id": "o-3", "later": True}, 0)
        print("o-3 ends as:", [*states(tasks, task.id)][-1])

        try:
            tasks.Get(pb.GetRequest(id="0" * 32), metadata=METADATA)
        except grpc.RpcError as error:
            code = dict(error.trailing_metadata())["tickwheel-code"]
            print("another task:", error.code().name, code)


if __name__ == "__main__":
    main()

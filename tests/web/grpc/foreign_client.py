"""A client in an environment of its own: code generated there, and nothing of tickwheel.

Run with the folder of that code and the address of a server; prints what the server answered.
"""

import json
import sys

sys.path.insert(0, sys.argv[1])

import grpc

from tickwheel.v1 import tasks_pb2 as pb
from tickwheel.v1 import tasks_pb2_grpc

assert sys.argv[1] in pb.__file__, pb.__file__

with grpc.insecure_channel(sys.argv[2]) as channel:
    tasks = tasks_pb2_grpc.TaskServiceStub(channel)
    request = pb.SubmitRequest(service="later", payload=json.dumps({"id": "o-1"}))
    task = tasks.Submit(request).task
    states = []
    for change in tasks.Watch(pb.WatchRequest(id=task.id)):
        states.append(change.task.state)
        if states.count(pb.STATE_RUNNING) == 1 and states[-1] == pb.STATE_RUNNING:
            attempt = change.task.attempt
            tasks.Feedback(
                pb.FeedbackRequest(
                    id=task.id, attempt=attempt, outcome=pb.OUTCOME_FINISHED, result="7"
                )
            )
    print(states[-1] == pb.STATE_FINISHED, tasks.Get(pb.GetRequest(id=task.id)).task.result)
    request.delay.FromSeconds(3600)
    print(tasks.Cancel(pb.CancelRequest(id=tasks.Submit(request).task.id)).won)

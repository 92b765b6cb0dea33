"""Submits per second over gRPC, beside the HTTP API of the same server in the same run.

    python benchmarks/grpc_api.py

One server on SQLite; each client is a process of its own with asyncio. Single submits have WORKERS
requests at once, batches BATCH_WORKERS with BATCH tasks each. The figures are medians of ROUNDS
rounds, in which the APIs take turns.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORKERS = 32
BATCH, BATCH_WORKERS = 500, 4
ROUNDS = 3
PAYLOAD = {"order": "o-1", "note": "x" * 100}


async def submit_over_grpc(address, tasks, batch):
    """Return the seconds that this many submits take."""
    import grpc

    from tickwheel.v1 import tasks_pb2 as pb
    from tickwheel.v1 import tasks_pb2_grpc

    request = pb.SubmitRequest(service="sink", payload=json.dumps(PAYLOAD))
    request.delay.FromSeconds(3600)
    many = pb.SubmitBatchRequest(tasks=[request] * batch)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = tasks_pb2_grpc.TaskServiceStub(channel)
        if batch == 1:
            return await timed(lambda: stub.Submit(request), tasks, WORKERS)
        return await timed(lambda: stub.SubmitBatch(many), tasks // batch, BATCH_WORKERS)


async def submit_over_http(address, tasks, batch):
    """Return the seconds that this many submits take."""
    from tickwheel.client import AsyncClient

    many = [{"service": "sink", "payload": PAYLOAD, "delay": 3600}] * batch
    async with AsyncClient(f"http://{address}") as client:
        if batch == 1:
            submit = lambda: client.submit("sink", PAYLOAD, delay=3600)  # noqa: E731
            return await timed(submit, tasks, WORKERS)
        submit_many = lambda: client.submit_many(many, batch=batch)  # noqa: E731
        return await timed(submit_many, tasks // batch, BATCH_WORKERS)


async def timed(submit, requests, workers):
    async def work():
        for _ in range(requests // workers):
            await submit()

    await submit()
    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(workers)))
    return time.perf_counter() - began


def measured(kind, address, tasks, batch):
    """Return the submits per second of one client process."""
    command = [sys.executable, __file__, "--client", kind, address, str(tasks), str(batch)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    return tasks / float(ran.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--single", type=int, default=6_400, help="single submits in a round")
    parser.add_argument("--batches", type=int, default=40, help="batches in a round")
    parser.add_argument("--client", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        kind, address, tasks, batch = given.client
        submit = {"grpc": submit_over_grpc, "http": submit_over_http}[kind]
        print(asyncio.run(submit(address, int(tasks), int(batch))))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "tickwheel", "serve", "--store", f"sqlite:///{folder}/tasks.db",
            "--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--allow-private-targets",
        ]  # fmt: skip
        with (Path(folder) / "log").open("w") as log:
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            compare(server, given.single, given.batches)
        finally:
            server.terminate()
            server.wait(30)


def compare(server, single, batches):
    addresses = {}
    for kind in ("http", "grpc"):
        addresses[kind] = re.search(rf"{kind}://([^/\s]+)", server.stdout.readline())[1]
    from tickwheel.client import Client

    with Client(f"http://{addresses['http']}") as client:
        client.put_service("sink", endpoint="http://127.0.0.1:9/", enabled=False)
    show("single submits", addresses, single, 1)
    show(f"batches of {BATCH}", addresses, batches * BATCH, BATCH)


def show(title, addresses, tasks, batch):
    """Measure both APIs in turn, and print their tasks per second."""
    found = {kind: [] for kind in addresses}
    for _ in range(ROUNDS):
        for kind, rates in found.items():
            rates.append(measured(kind, addresses[kind], tasks, batch))
    medians = {kind: statistics.median(rates) for kind, rates in found.items()}
    for kind, rates in found.items():
        listed = ", ".join(f"{rate:,.0f}" for rate in rates)
        print(f"{title}, {kind}: {medians[kind]:,.0f} tasks/s (rounds: {listed})")
    print(f"{title}, gRPC / HTTP: {medians['grpc'] / medians['http']:.2f}", flush=True)


if __name__ == "__main__":
    main()

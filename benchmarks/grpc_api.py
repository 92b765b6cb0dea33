"""Submits per second over gRPC, compared with the HTTP API of the same server in the same run.

    python benchmarks/grpc_api.py [--quick] [--output DIRECTORY]

One server on SQLite; each client is a process of its own with asyncio. Single submits have WORKERS
requests at once, batches BATCH_WORKERS with BATCH tasks each. The figures are medians of ROUNDS
rounds, in which the APIs take turns. With --output it also writes the figures and the page.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
from output import save
from page import describe_run
from report import cell, table
from results import Results

LABELS = {"http": "HTTP", "grpc": "gRPC"}
WORKERS = 32
BATCH, BATCH_WORKERS = 500, 4
ROUNDS = 3
WHOLE, QUICK = (6_400, 40), (640, 8)
"""Single submits and batches of a round: multiples of the requests at once."""

NOTE = f"""\
Clients with asyncio submit to one server on SQLite: {WORKERS} single requests at once, or
{BATCH_WORKERS} batches of {BATCH}. Medians of the rounds, in which the APIs take turns. In
brackets: the multiple of HTTP's rate.
"""
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
    parser.add_argument("--quick", action="store_true", help="fewer submits, one round")
    parser.add_argument("--output", type=Path, help="directory for JSON and page")
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
            results = compare(server, *((QUICK, 1) if given.quick else (WHOLE, ROUNDS)))
        finally:
            server.terminate()
            server.wait(30)
    print(rate_table(results))
    if given.output:
        where, versions = machine.describe(), machine.versions("grpcio", "apsw", "uvloop")
        text = f"# The gRPC API\n\n{describe_run(where, versions)}\n{NOTE}\n{rate_table(results)}\n"
        record = {"machine": where, "versions": versions, **results.as_json()}
        save(given.output, "grpc_api", record, text)


def compare(server, amount, rounds):
    """Measure both APIs in turn, single submits and batches."""
    addresses = {}
    for kind in LABELS:
        addresses[kind] = re.search(rf"{kind}://([^/\s]+)", server.stdout.readline())[1]
    from tickwheel.client import Client

    with Client(f"http://{addresses['http']}") as client:
        client.put_service("sink", endpoint="http://127.0.0.1:9/", enabled=False)
    results = Results(LABELS, {})
    single, batches = amount
    for batch, tasks in ((1, single), (BATCH, batches * BATCH)):
        for _ in range(rounds):
            for kind, address in addresses.items():
                results.add(batch, kind, "rate", [measured(kind, address, tasks, batch)])
    return results


def rate_table(results):
    """Return both APIs' tasks per second, and the ratio to HTTP."""
    rows = [["tasks per second", *LABELS.values()]]
    for batch in results.sizes():
        http, grpc = (results.figure(batch, kind, "rate") for kind in LABELS)
        what = "single submits" if batch == 1 else f"batches of {batch}"
        rows.append([what, cell(http, None), cell(grpc, http)])
    return table(rows)


if __name__ == "__main__":
    main()

"""Submits per second over gRPC, beside the HTTP API of the same server in the same run.

    python benchmarks/grpc_api.py

One server on SQLite; each client is a process of its own with asyncio and WORKERS requests at once.
The figures are medians of ROUNDS rounds, in which the two take turns.
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
ROUNDS = 3
PAYLOAD = {"order": "o-1", "note": "x" * 100}


async def submit_over_grpc(address, requests):
    """Return the seconds that this many submits take."""
    import grpc

    from tickwheel.v1 import tasks_pb2 as pb
    from tickwheel.v1 import tasks_pb2_grpc

    request = pb.SubmitRequest(service="sink", payload=json.dumps(PAYLOAD))
    request.delay.FromSeconds(3600)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = tasks_pb2_grpc.TaskServiceStub(channel)
        return await timed(lambda: stub.Submit(request), requests)


async def submit_over_http(address, requests):
    """Return the seconds that this many submits take."""
    from tickwheel.client import AsyncClient

    async with AsyncClient(f"http://{address}") as client:
        return await timed(lambda: client.submit("sink", PAYLOAD, delay=3600), requests)


async def timed(submit, requests):
    async def work():
        for _ in range(requests // WORKERS):
            await submit()

    await submit()
    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(WORKERS)))
    return time.perf_counter() - began


def measured(kind, address, requests):
    """Return the submits per second of one client process."""
    command = [sys.executable, __file__, "--client", kind, address, str(requests)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    return requests / float(ran.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=6_400)
    parser.add_argument("--client", nargs=3)
    given = parser.parse_args()
    if given.client:
        kind, address, requests = given.client
        submit = {"grpc": submit_over_grpc, "http": submit_over_http}[kind]
        print(asyncio.run(submit(address, int(requests))))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "tickwheel", "serve", "--store", f"sqlite:///{folder}/tasks.db",
            "--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0", "--allow-private-targets",
        ]  # fmt: skip
        with (Path(folder) / "log").open("w") as log:
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            compare(server, given.requests)
        finally:
            server.terminate()
            server.wait(30)


def compare(server, requests):
    addresses = {}
    for kind in ("http", "grpc"):
        addresses[kind] = re.search(rf"{kind}://([^/\s]+)", server.stdout.readline())[1]
    from tickwheel.client import Client

    with Client(f"http://{addresses['http']}") as client:
        client.put_service("sink", endpoint="http://127.0.0.1:9/", enabled=False)
    found = {"http": [], "grpc": []}
    for _ in range(ROUNDS):
        for kind, rates in found.items():
            rates.append(measured(kind, addresses[kind], requests))
    rates = {kind: statistics.median(one) for kind, one in found.items()}
    for kind, one in found.items():
        listed = ", ".join(f"{rate:,.0f}" for rate in one)
        print(f"{kind}: {rates[kind]:,.0f} submits/s (rounds: {listed})")
    print(f"gRPC / HTTP: {rates['grpc'] / rates['http']:.2f}")


if __name__ == "__main__":
    main()

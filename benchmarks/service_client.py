"""Run a bare HTTP client, shaped like the server's calls, in its own process; prints JSON.

    python benchmarks/service_client.py tickwheel http://127.0.0.1:8080/hook --concurrency 64

One process, one loop, `--concurrency` calls in flight: the upper bound of the server's callbacks,
without storage. A client that is not installed prints an empty object.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from http_client import CLIENTS, rate
from service_load import run

CONNECT_SECONDS = 0.3


async def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Return calls per second once all connections are open, and the processor time of each."""
    try:
        async with CLIENTS[given.client](given.url, given.concurrency) as call:
            await rate(call, given.concurrency, CONNECT_SECONDS)
            each, cpu_us = await rate(call, given.concurrency, given.seconds)
    except ImportError:
        return {}
    return {"rate": each, "cpu_us": cpu_us}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("client", choices=tuple(CLIENTS))
    parser.add_argument("url")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=2.0)
    json.dump(run(measure(parser.parse_args())), sys.stdout)


if __name__ == "__main__":
    main()

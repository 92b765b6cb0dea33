"""The chaos run: a real cluster under load, faults from a seeded plan, and the audit at the end.

    python -m chaos.run --seconds 1800 --seed 7 --directory build/chaos [--nodes 4] [--short]

It needs root: the cluster is in namespaces of its own, which end with the run. The directory keeps
the plan, the events, the ledgers of client and callee, and the logs of the nodes.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from chaos import faults, isolation
from chaos.audit import Audit
from chaos.cluster import SOURCE, TESTS, Cluster
from chaos.impostor import Impostor
from chaos.ledger import Ledger

DEFAULTS = {"lease": 30.0, "session": 6.0, "workers": 24, "pause": 0.4}  # as in production
SHORT = {"lease": 5.0, "session": 3.0, "workers": 12, "pause": 0.1}
SHORT_PACE = 3.0
SETTLE_SECONDS = 240.0
SETUP_SECONDS = 120.0


def main():
    """Isolate this program first; inside, run it and print the figures."""
    parser = argparse.ArgumentParser(description="Break a cluster, and count what it loses.")
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    parser.add_argument("--nodes", type=int, default=4, choices=(3, 4, 5))
    parser.add_argument("--directory", type=Path, default=Path("build/chaos"))
    parser.add_argument("--short", action="store_true", help="shorter sessions, leases and faults")
    given = parser.parse_args()
    if isolation.CGROUP in os.environ:
        return run(given)
    if obstacle := isolation.obstacle():
        print(f"chaos cannot run here: {obstacle}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was made is removed
    argv = [
        sys.executable, "-m", "chaos.run", "--seconds", given.seconds, "--seed", given.seed,
        "--nodes", given.nodes, "--directory", given.directory.resolve(),
    ]  # fmt: skip
    argv += ["--short"] if given.short else []
    return isolation.run_isolated(
        argv, seconds=given.seconds + SETUP_SECONDS + SETTLE_SECONDS + 120,
        environment={"PYTHONPATH": f"{TESTS}:{SOURCE}"},
    )  # fmt: skip


def run(given):
    """Run it in this namespace; return the exit code."""
    directory = given.directory / f"seed-{given.seed}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    pace = SHORT_PACE if given.short else 1.0
    plan = faults.make_plan(given.seed, given.seconds, given.nodes, pace)
    (directory / "plan.json").write_text(json.dumps([event._asdict() for event in plan], indent=1))
    about = f"{given.seconds:g} s, {given.nodes} nodes, {len(plan)} faults"
    print(f"seed {given.seed}: {about}", flush=True)
    log = Ledger(directory / "events.jsonl")
    options = SHORT if given.short else DEFAULTS
    cluster = Cluster(directory, given.nodes, seed=given.seed, **options)
    with cluster:
        try:
            figures, violations = break_and_audit(cluster, plan, log, given.seconds)
        finally:
            for node in cluster.nodes:
                shutil.copy(node.directory / "server.log", directory / f"{node.machine.name}.log")
    (directory / "figures.json").write_text(json.dumps([figures, violations], indent=1))
    for name, value in figures.items():
        print(f"  {name}: {value}")
    for text in violations[:20]:
        print(f"VIOLATION {text}")
    print(f"{len(violations)} violations", flush=True)
    return 1 if violations else 0


def break_and_audit(cluster, plan, log, seconds):
    """Apply the plan under load, let the cluster recover, and return figures and violations."""
    with Impostor(cluster.databases) as impostor:
        with cluster.load(), faults.Lanes(cluster, plan, log) as lanes:
            lanes.wait(seconds)
        log.note("over")
        for node in cluster.nodes:
            node.restore()
        cluster.ensemble.start()
        cluster.databases.restore()
        unsettled = []
        try:
            cluster.settle(SETTLE_SECONDS)
        except TimeoutError as error:
            unsettled.append(f"the cluster does not recover: {error}")
    audit = Audit(cluster.databases.primary.url, cluster.answers, cluster.calls)
    figures = {"faults": lanes.applied} | audit.run() | {
        "stale claims refused": impostor.refused,
        "promotions; seconds to the first claim": cluster.databases.first_claims,
        "exits of nodes that no fault caused": [
            code for node in cluster.nodes for code in node.exits
        ],
        "errors in the logs": dict(
            Counter(
                line["message"][:90] for line in cluster.lines() if line.get("level") == "error"
            ).most_common(15)
        ),
    }  # fmt: skip
    problems = [f"a fault could not be applied: {text}" for text in lanes.problems]
    return figures, unsettled + audit.violations + problems


if __name__ == "__main__":
    sys.exit(main())

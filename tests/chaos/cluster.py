"""The cluster of the chaos run: ZooKeeper, PostgreSQL, nodes and callee, each on its own machine.

All addresses are in one network of namespaces: see `network`. One node reaches everything through
proxies, which can delay it; the service `delayed` is called through one.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg

import servers
import tickwheel
from chaos import isolation
from chaos.network import NETWORK, PROXIES, Machine, open_network, run
from false_clock import FalseClock
from proxies import Proxy
from tickwheel.client import Client
from web.serving import PATCHED, Served

PORT = 7380
TESTS = Path(__file__).resolve().parent.parent
SOURCE = Path(tickwheel.__file__).resolve().parents[1]
DATABASE_SIZE = "1g"
LOG_SIZE = "64m"
START_SECONDS = 120.0
CLOCKED = "node1"  # the node whose clock can be set: the library that does it costs time
BAIT = 64  # tasks of a disabled service, which are due and stay unclaimed
BACKOFF = {"first": 0.2, "factor": 1.5, "max": 1, "jitter": 0.5}
SERVICE = {"timeout": 3, "max_attempts": 1000, "backoff": BACKOFF, "concurrency": 60}
SERVICES = {
    "plain": {}, "slow": {}, "flaky": {}, "delayed": {}, "later": {"feedback_timeout": 6},
    "doomed": {"max_attempts": 2, "breaker": {"failures": 1_000_000}}, "bait": {"enabled": False},
}  # fmt: skip
# The harness's own record of every claim, made in the same transaction: `current` is the epoch that
# the store has for the shard at that moment.
RECORD_CLAIMS = """
    CREATE SCHEMA chaos;
    CREATE TABLE chaos.claim (
        number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        task_id uuid NOT NULL, attempt integer NOT NULL, shard integer NOT NULL,
        epoch bigint NOT NULL, current bigint NOT NULL, node text NOT NULL,
        early_ms bigint NOT NULL
    );
    CREATE FUNCTION chaos.record() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO chaos.claim (task_id, attempt, shard, epoch, current, node, early_ms)
        VALUES (
            NEW.id, NEW.attempt, NEW.shard, NEW.epoch,
            (SELECT epoch FROM tickwheel.shard WHERE shard = NEW.shard), NEW.node,
            NEW.due_at_ms - floor(extract(epoch FROM clock_timestamp()) * 1000)
        );
        RETURN NULL;
    END $$;
    CREATE TRIGGER record AFTER UPDATE ON tickwheel.task FOR EACH ROW
        WHEN (OLD.state = 'delay' AND NEW.state = 'running') EXECUTE FUNCTION chaos.record();
"""


def wait_until(condition, what, seconds):
    """Wait until a condition holds, and leave the processor to the others."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"not within {seconds:g} s: {what() if callable(what) else what}")
        time.sleep(0.2)


def mount(path, size):
    """Mount a small file system in memory, which a fault can fill."""
    owner = path.stat()
    run("mount", "-t", "tmpfs", "-o", f"size={size},mode=0755", "tmpfs", str(path))
    os.chown(path, owner.st_uid, owner.st_gid)


@contextlib.contextmanager
def full(path):
    """Fill the small file system that is mounted at a path, and free it in the end."""
    assert path.is_mount(), f"{path} is on a disk that others use"
    filler = path / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            while room := free_bytes(path):
                with contextlib.suppress(OSError):  # someone else was faster
                    os.posix_fallocate(file.fileno(), filler.stat().st_size, room)
        yield
    finally:
        filler.unlink()


def free_bytes(path):
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


class Database(servers.PostgresServer):
    """A PostgreSQL on a machine of its own, on a small disk."""

    def prepare(self, attempt):
        if not self.directory.is_mount():
            mount(self.directory, DATABASE_SIZE)
        super().prepare(attempt)
        lines = [f"host {what} all {NETWORK}.0/24 trust" for what in ("all", "replication")]
        (self.directory / "data" / "pg_hba.conf").write_text("\n".join([*lines, ""]))

    def close(self):
        super().close()
        if self.directory.is_mount():
            run("umount", "-l", str(self.directory))
            self.directory.rmdir()


class Standby(Database, servers.PostgresStandby):
    """A synchronous standby of one."""


class Databases:
    """A primary and its synchronous standby; after a promotion a new standby is made."""

    def __init__(self, group, clock):
        self._machines = [Machine("db1", 21), Machine("db2", 22)]
        self.group = group
        self.clock = clock
        settings = {"max_connections": 300, "max_wal_size": "128MB", "wal_sender_timeout": "10s"}
        self._options = {
            "port": 5432, "environment": clock.environment, "options": settings,
        }  # fmt: skip
        self.first_claims = []  # seconds from each promotion to the first claim on the new primary

    def start(self):
        first, second = self._machines
        self.primary = Database(host=first.address, namespace=first.namespace, **self._options)
        self.primary.start()
        self._follow(second.address, second.namespace)
        self.group.add(self.primary.pid)
        return self

    def _follow(self, host, namespace):
        self.standby = Standby(self.primary, host=host, namespace=namespace, **self._options)
        self.group.add(self.standby.start().pid)

    @property
    def addresses(self):
        return [machine.address for machine in self._machines]

    def url(self, hosts=()):
        """Return the URL of the store, by default without proxies."""
        places = ",".join(hosts or [f"{address}:5432" for address in self.addresses])
        return f"postgresql://tickwheel@{places}/postgres"

    def restore(self):
        """Start what does not run: after a kill, or a full disk."""
        for server in (self.primary, self.standby):
            if not server.running:
                server.start()
                self.group.add(server.pid)

    def is_safe(self):
        """Return whether the standby has every commit that was acknowledged."""
        states = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            return self.primary.execute(states) == "1"
        return False

    def promote(self):
        """Kill the primary, promote the standby, and make a standby in place of the old primary."""
        old = self.primary
        old.kill()
        self.standby.promote()
        promoted_at = time.monotonic()
        self.primary = self.standby
        watcher = threading.Thread(target=self._await_claim, args=(promoted_at,), daemon=True)
        watcher.start()
        old.close()
        self._follow(old.host, old.namespace)
        watcher.join(START_SECONDS)

    def _await_claim(self, promoted_at):
        """Note the time until the first claim on the new primary."""
        ask = "SELECT coalesce(max(number), 0) FROM chaos.claim"
        with psycopg.connect(self.primary.url, autocommit=True) as connection:
            before = connection.execute(ask).fetchone()
            while connection.execute(ask).fetchone() == before:
                if time.monotonic() > promoted_at + START_SECONDS:
                    return
                time.sleep(0.02)
        self.first_claims.append(round(time.monotonic() - promoted_at, 2))

    def close(self):
        for server in (self.standby, self.primary):
            server.close()


class Ensemble:
    """Three ZooKeeper servers."""

    def __init__(self):
        self.machines = [Machine(f"zk{number}", 10 + number) for number in (1, 2, 3)]
        peers = {
            f"server.{number}": f"{machine.address}:2888:3888"
            for number, machine in enumerate(self.machines, 1)
        }
        self.servers = [
            servers.ZooKeeperServer(
                number=number, options=peers, host=machine.address, namespace=machine.namespace,
                port=2181,
            )
            for number, machine in enumerate(self.machines, 1)
        ]  # fmt: skip

    def start(self):
        """Start what does not run: a server is ready when it knows a majority."""
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(servers.ZooKeeperServer.start, self.servers))
        return self

    @property
    def addresses(self):
        return [machine.address for machine in self.machines]

    def url(self, hosts=()):
        return f"zookeeper://{','.join(hosts or [one.address for one in self.servers])}/chaos"

    def leader(self):
        """Return the number of the leader in the list, or of any server if there is no leader."""
        for number, server in enumerate(self.servers):
            with contextlib.suppress(OSError):
                if server.running and "Mode: leader" in server.ask("srvr"):
                    return number
        return 0

    def close(self):
        for server in self.servers:
            server.close()


class Node(Served):
    """A node on a machine of its own; its log is on a small disk."""

    def __init__(self, machine, group, store, coordinator, *, lease, session, clock=False):
        directory = Path(os.environ["TMPDIR"]) / machine.name
        directory.mkdir()
        mount(directory, LOG_SIZE)
        self.machine = machine
        self.group = group
        self.clock = FalseClock(directory) if clock else None
        self.exits = []  # exit codes of ends that no fault caused
        super().__init__(
            "--store", store, "--coordinator", coordinator, "--node", machine.name,
            "--allow-private-targets", "--insecure-without-tokens", "--log-format", "json",
            cwd=directory, listen=f"{machine.address}:{PORT}", namespace=machine.namespace,
            environment={
                **(self.clock.environment if clock else {}), "PYTHONPATH": f"{PATCHED}:{SOURCE}",
                "TEST_LEASE_SECONDS": str(lease), "TEST_SESSION_SECONDS": str(session),
            },
        )  # fmt: skip
        self.url = f"http://{machine.address}:{PORT}"

    def launch(self):
        super().launch()
        self.group.add(self.pid)
        return self

    def restore(self):
        """Start it again if it has ended by itself, as a supervisor would."""
        if self.process.poll() is not None:
            self.exits.append(self.process.returncode)
            self.restart()

    def restart(self):
        """Start a process that has ended again, without waiting for it."""
        self.process.stdout.close()
        self.launch()

    def is_serving(self):
        """Return whether it has started, ready or not."""
        with contextlib.suppress(OSError):
            return self.get("/healthz").status == 200
        return False

    def pause(self):
        self.signal(signal.SIGSTOP)

    def resume(self):
        self.signal(signal.SIGCONT)

    def terminate(self):
        """Stop it with SIGTERM, and return the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(START_SECONDS)


class Cluster:
    """Everything together, while it is entered."""

    def __init__(self, directory, nodes, *, seed, lease, session, workers, pause):
        self.directory = directory
        self._count = nodes
        self._seed = seed
        self._seconds = {"lease": lease, "session": session}
        self._load = [str(workers), str(pause)]
        self._group = isolation.Group(Path(os.environ[isolation.CGROUP]) / "cluster")
        self._stack = contextlib.ExitStack()
        self._client = None

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _open(self, stack):
        run("mount", "-t", "tmpfs", "tmpfs", servers.MEMORY)  # for data that ends with this run
        open_network()
        clock = Path(os.environ["TMPDIR"]) / "clock"
        clock.mkdir()
        clock.chmod(0o755)
        group = isolation.Group(self._group.path / "databases")
        self.databases = Databases(group, FalseClock(clock))
        stack.callback(self.databases.close)
        self.ensemble = Ensemble()
        stack.callback(self.ensemble.close)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda part: part.start(), (self.databases, self.ensemble)))
        self.callee = Machine("callee", 3)
        self._open_proxies(stack)
        machines = [Machine(f"node{number}", 30 + number) for number in range(1, self._count + 1)]
        self.urls = [f"http://{machine.address}:{PORT}" for machine in machines]
        self._start_callee(stack)
        self.nodes = [self._start_node(stack, machine, machines[-1]) for machine in machines]
        self._configure()

    def _open_proxies(self, stack):
        def proxy(address, port):
            made = Proxy(port, target=address, host=PROXIES, seed=self._seed)
            return stack.enter_context(made)

        self.database_proxies = [proxy(one, 5432) for one in self.databases.addresses]
        self.zookeeper_proxies = [proxy(one, 2181) for one in self.ensemble.addresses]
        self.callee_proxy = proxy(self.callee.address, PORT)

    def _start_callee(self, stack):
        self.calls = self.directory / "calls.jsonl"
        arguments = [self.callee.address, str(PORT), str(self.calls), str(self._seed), *self.urls]
        process = self._python("chaos.callee", arguments, self.callee.namespace)
        stack.callback(self._end, process)
        assert process.stdout.readline() == b"ready\n", "the callee does not start"

    def _start_node(self, stack, machine, last):
        store, coordinator = self.databases.url(), self.ensemble.url()
        if machine is last:  # its connections can be delayed
            store = self.databases.url([f"{PROXIES}:{one.port}" for one in self.database_proxies])
            coordinator = self.ensemble.url(
                [f"{PROXIES}:{one.port}" for one in self.zookeeper_proxies]
            )
        group = isolation.Group(self._group.path / machine.name)
        clock = machine.name == CLOCKED
        node = Node(machine, group, store, coordinator, **self._seconds, clock=clock)
        node.launch()
        stack.callback(lambda: self._end(node.process))
        return node

    def _python(self, module, arguments, namespace=""):
        environment = servers.clean_environment() | {"PYTHONPATH": f"{TESTS}:{SOURCE}"}
        log = (self.directory / f"{module}.log").open("ab")
        return servers.launch(
            [sys.executable, "-m", module, *arguments], namespace=namespace, env=environment,
            stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip

    def _end(self, process):
        if process.poll() is None:
            process.kill()
            process.wait()

    def _configure(self):
        self.wait_until_ready()
        with self.client() as client:
            for name, options in SERVICES.items():
                path = "plain" if name in ("delayed", "bait") else name
                host = f"{PROXIES}:{self.callee_proxy.port}" if name == "delayed" else None
                host = host or f"{self.callee.address}:{PORT}"
                client.put_service(name, endpoint=f"http://{host}/{path}", **SERVICE | options)
            for item in client.submit_many(
                [{"service": "bait", "payload": n} for n in range(BAIT)]
            ):
                assert not isinstance(item, Exception), item
        self.databases.primary.execute(RECORD_CLAIMS)

    def client(self, number=0):
        return Client(self.urls[number], timeout=60, retries=100)

    def wait_until_ready(self, seconds=START_SECONDS):
        """Wait until each node answers that it is ready, and all shards have owners."""
        for node in self.nodes:
            wait_until(
                lambda at=node: self._ready(at),
                lambda at=node: f"{at.url} is ready: {at.log()[-2000:]}", seconds,
            )  # fmt: skip
        owned = "SELECT count(*) FROM tickwheel.shard WHERE owner IS NULL"
        primary = self.databases.primary
        wait_until(lambda: primary.execute(owned) == "0", "all shards have owners", seconds)

    def _ready(self, node):
        node.restore()
        with contextlib.suppress(OSError):
            return node.get("/readyz").status == 200
        return False

    @contextlib.contextmanager
    def load(self):
        """Use the API while this is entered."""
        self.answers = self.directory / "answers.jsonl"
        arguments = [str(self.answers), str(self._seed), *self._load, *self.urls]
        process = self._python("chaos.load", arguments)
        try:
            yield
            process.terminate()
            assert process.wait(START_SECONDS) == 0, "the client has failed: see chaos.load.log"
        finally:
            self._end(process)

    def settle(self, seconds):
        """Cancel the bait, end the schedules, and wait until no task is live."""
        self.wait_until_ready()
        with self.client() as client:
            for schedule in client.schedules():
                client.delete_schedule(schedule.name)
            client.cancel_where(service="bait")
        live = "SELECT count(*) FROM tickwheel.task"
        primary = self.databases.primary
        wait_until(lambda: primary.execute(live) == "0", "no task is live", seconds)

    def lines(self):
        """Return the log lines of all nodes, decoded."""
        found = []
        for node in self.nodes:
            for line in node.log().splitlines():
                with contextlib.suppress(ValueError):  # the disk was full
                    found.append(json.loads(line) | {"node": node.machine.name})
        return found

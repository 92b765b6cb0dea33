"""Real servers for the tests: child processes on loopback, each in a temporary directory.

- A server ends with the test process, however that ends; only what it started is ever signalled.
- It keeps its port and its data through `stop`, `kill` and `restart`; `close` removes the data.
- A server that is not installed fails the test and names the package: nothing is skipped.
"""

import asyncio
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

PATIENCE = 60.0  # seconds until a server that does not answer counts as broken
POLL = 0.005
TRIES = 5
MEMORY = "/dev/shm"
MEMORY_BYTES = 4 << 30  # free space there for the data of servers
ROOT = os.geteuid() == 0

# Becomes the server: without root, tied to the life of the process that asked for it. A program
# of its own and no preexec_fn, which is unsafe (and warned of) where there are threads.
LAUNCH = """
import ctypes, os, pwd, signal, sys
parent, death, user, *argv = sys.argv[1:]
if user:
    who = pwd.getpwnam(user)
    os.setgroups([])
    os.setgid(who.pw_gid)
    os.setuid(who.pw_uid)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(death))
if os.getppid() != int(parent):
    sys.exit("the process that started this one is gone")
os.execv(argv[0], argv)
"""


@cache
def _starter():
    """A thread that never ends: a child dies with the *thread* that started it."""
    return ThreadPoolExecutor(1, "servers")


def launch(argv, *, user="", death=signal.SIGKILL, namespace="", **options):
    """Start a program that ends with this process; return its `Popen`.

    `namespace`: the path of a network namespace to start it in.
    """
    inside = ["/usr/bin/nsenter", f"--net={namespace}"] if namespace else []
    command = [sys.executable, "-ISc", LAUNCH, str(os.getpid()), str(int(death)), user, *argv]
    options |= {"stdin": subprocess.DEVNULL, "start_new_session": True}  # Ctrl-C is for the tests
    if threading.current_thread() is threading.main_thread():
        return subprocess.Popen([*inside, *command], **options)
    return _starter().submit(subprocess.Popen, [*inside, *command], **options).result()


def _spawn(argv, user, death, log, namespace=""):
    options = {"stdout": log, "stderr": log, "cwd": "/", "env": clean_environment()}
    return launch(argv, user=user, death=death, namespace=namespace, **options)


def clean_environment():
    """The environment without what is meant for the Python under test, or for another server."""
    odd = re.compile(
        r"LD_PRELOAD|PYTHON.*|MAKE.*|(A|UB)SAN_OPTIONS|PG[A-Z]+|LC_.*|LANG(UAGE)?|TZ|FAKETIME.*"
    )
    kept = {name: value for name, value in os.environ.items() if not odd.fullmatch(name)}
    return kept | {"LC_ALL": "C.UTF-8", "TZ": "UTC"}


async def close_listener(server):
    """Close an asyncio server between two accepts: asyncio would leave such a connection open."""
    for _ in range(100):  # a handshake may take longer: that one has been let in
        names = [task.get_coro().__name__ for task in asyncio.all_tasks()]
        if "_accept_connection2" not in names:
            break
        await asyncio.sleep(0)
    server.close()


def free_port():
    """Return a free port.

    Below the range of outgoing connections: within it, one of those may take the port while the
    server is down, or connect to itself and look like a server.
    """
    low = 0
    span = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if span.exists():
        low = int(span.read_text().split()[0])
    candidates = random.SystemRandom().sample(range(15_000, low), 50) if low > 16_000 else []
    for port in [*candidates, 0]:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise RuntimeError("no port is free")


def data_folder():
    """Return the folder in memory if it has space: on a disk, servers mostly wait for files."""
    try:
        free = shutil.disk_usage(MEMORY).free
    except OSError:
        return None
    return MEMORY if free >= MEMORY_BYTES and os.access(MEMORY, os.W_OK) else None


def _stat(pid):
    """Return the state and the parent of a process, or None if it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent = text.rpartition(")")[2].split()[:2]
    return state, int(parent)


def _descendants(pid):
    """The processes below `pid`, without it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (found := _stat(entry.name)):
            parents.setdefault(found[1], []).append(int(entry.name))
    below, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        below += children
        todo += children
    return below


def _gone(pid):
    found = _stat(pid)
    return found is None or found[0] in "ZX"  # an orphan may stay as a zombie


def _stopped(pid):
    """Whether all threads stand still; a system call under way, as for a lock, ends first."""
    try:
        threads = [*Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError:
        return True
    states = [_stat(f"{pid}/task/{thread.name}") for thread in threads]
    return all(found is None or found[0] in "TtZX" for found in states)


def wait_until(condition, what, seconds=PATIENCE):
    """Return when `condition()` holds; a failure that says `what` did not happen otherwise."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(POLL)


class Server:
    """One server process: what all kinds have in common.

    A kind adds `argv()`, the command; `ready()`, whether this very process answers; and
    `prepare(attempt)`, what must be in its directory before the first start.
    """

    name = "server"
    package = ""  # Debian's name of what to install
    user = ""  # the user as whom root runs it; by default the user of the tests
    stop_signal = signal.SIGTERM
    death_signal = signal.SIGKILL

    def __init__(
        self, *, durable=False, options=None, environment=None, host="127.0.0.1", namespace="",
        port=None,
    ):  # fmt: skip
        self.durable = durable
        self.host = host
        self.namespace = namespace  # the path of its network namespace; empty: this one
        self._own_port = port  # None: any free one
        self.options = dict(options or {})
        self.environment = dict(environment or {})
        self.port = 0
        self._process = None
        self._settled = False  # it ran once: the port is its own
        self._paused = []
        self.binaries()
        where = None if durable else data_folder()
        self.directory = Path(tempfile.mkdtemp(prefix=f"tickwheel-{self.name}-", dir=where))
        self.own(self.directory)

    def argv(self):
        raise NotImplementedError

    def ready(self):
        raise NotImplementedError

    def binaries(self):
        """Where its programs are; fails the test when they are missing."""
        raise NotImplementedError

    def prepare(self, attempt):
        """Make what the first start needs."""

    @property
    def pid(self):
        return self._process.pid if self.running else None

    @property
    def running(self):
        return self._process is not None and self._process.poll() is None

    def start(self):
        """Start it, and return when it answers; nothing when it runs already."""
        if self.running:
            return self
        for attempt in range(TRIES):
            if not self._settled:
                self.port = self._own_port or free_port()
                self.prepare(attempt)
            self._launch()
            try:
                wait_until(lambda: not self.running or self.ready(), f"{self.name} answers")
            except TimeoutError as error:
                self.kill()
                raise RuntimeError(f"{error}\n{self.log()}") from None
            if self.running:
                self._settled = True
                return self
        raise RuntimeError(f"{self.name} does not start:\n{self.log()}")

    def stop(self):
        """End it cleanly; nothing when it does not run."""
        self._end(self.stop_signal)

    def _end(self, number):
        if not self.running:
            return
        self.resume()
        self._process.send_signal(number)
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self):
        """End it and all its processes with SIGKILL: what it did not write is lost."""
        if not self.running:
            return
        family = self._freeze()
        for pid in family:
            self._signal(pid, signal.SIGKILL)
        self._process.wait(PATIENCE)
        wait_until(lambda: all(map(_gone, family)), f"{self.name} is gone")
        self._paused = []

    def restart(self):
        """Stop it and start it again: same port, same data."""
        self.stop()
        return self.start()

    def pause(self):
        """Let all its processes stand still: connections stay open, and nothing answers."""
        self._paused = self._freeze()

    def resume(self):
        """Let its processes go on after `pause`."""
        paused, self._paused = self._paused, []
        for pid in paused:
            self._signal(pid, signal.SIGCONT)

    def close(self):
        """End it, whatever it has not written, and remove its directory."""
        try:
            self._end(self.death_signal)
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def log(self, lines=40):
        """The last lines that it wrote."""
        path = self.directory / "log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])

    def own(self, path):
        """Give `path` to the user that the server runs as."""
        if ROOT and self.user:
            who = self._account()
            os.chown(path, who.pw_uid, who.pw_gid)

    def missing(self):
        """Fail the test: the server is not installed."""
        pytest.fail(f"{self.name} is not here: apt-get install {self.package}", pytrace=False)

    def _account(self):
        try:
            return pwd.getpwnam(self.user)
        except KeyError:
            return self.missing()

    def _launch(self):
        user = self.user if ROOT else ""
        with (self.directory / "log").open("ab") as log:
            # Set for the server alone: what is preloaded must not run as root before it.
            given = [f"{name}={value}" for name, value in self.environment.items()]
            argv = ["/usr/bin/env", *given, *(str(part) for part in self.argv())]
            self._process = _spawn(argv, user, self.death_signal, log, self.namespace)

    def _freeze(self):
        """Stop its processes, the parent first so that it starts no more; return them all."""
        family = [self._process.pid]
        for pid in family:
            self._signal(pid, signal.SIGSTOP)
            wait_until(lambda pid=pid: _stopped(pid), f"process {pid} stands still")
            family += [child for child in _descendants(pid) if child not in family]
        return family

    def _signal(self, pid, number):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass

    def __enter__(self):
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        return f"<{type(self).__name__} port={self.port} {'running' if self.running else 'down'}>"


class PostgresServer(Server):
    """PostgreSQL, user `tickwheel`, no password.

    - Fast and safe against kill -9 of the server, not against a loss of power: `durable=True`
      leaves fsync on.
    - `options` are settings, as in `options={"wal_level": "logical"}`.
    """

    name = "postgres"
    package = "postgresql"
    user = "postgres"
    stop_signal = signal.SIGINT
    death_signal = signal.SIGQUIT

    @property
    def url(self):
        return self.url_for("postgres")

    def url_for(self, database):
        return f"postgresql://tickwheel@{self.host}:{self.port}/{database}"

    def standby(self, **options):
        """Return a synchronous standby of this server: a commit waits until it has it on disk."""
        return PostgresStandby(self, **options)

    def promote(self):
        """Make a standby a primary, and return when it accepts writes."""
        self.execute(f"SELECT pg_promote(wait_seconds => {PATIENCE:g})")

    def execute(self, statement, database="postgres"):
        """Run SQL, and return what it printed: for tests to look behind the driver's back."""
        psql = [self.binaries() / "psql", "-XqAt", "-v", "ON_ERROR_STOP=1", "-d"]
        done = subprocess.run(
            [*psql, self.url_for(database), "-c", statement],
            capture_output=True,
            check=False,
            text=True,
            env=clean_environment(),
            timeout=PATIENCE,
        )
        if done.returncode:
            raise RuntimeError(f"{statement}: {done.stderr.strip()}")
        return done.stdout.rstrip("\n")

    def binaries(self):
        installed = Path("/usr/lib/postgresql").glob("*/bin/initdb")
        newest = max(installed, key=lambda path: float(path.parts[-3]), default=None)
        if newest is None:
            found = shutil.which("initdb")
            newest = Path(found).resolve() if found else self.missing()
        return newest.parent

    def argv(self):
        settings = {
            "listen_addresses": self.host,
            "unix_socket_directories": "",
            "max_connections": 200,
            "synchronous_commit": "on",
            "timezone": "UTC",
            "log_timezone": "UTC",
        }
        if not self.durable:
            settings |= {"fsync": "off", "full_page_writes": "off"}
        settings |= self.options
        flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [
            self.binaries() / "postgres",
            "-D",
            self.directory / "data",
            "-p",
            self.port,
            *flags,
        ]

    def ready(self):
        """Return whether the server is ready, by its pid file."""
        try:
            lines = (self.directory / "data" / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return lines[:1] == [str(self._process.pid)] and lines[7:8] == ["ready   "]

    def prepare(self, attempt):
        data = self.directory / "data"
        template = self._template()
        if attempt == 1 and "could not bind" not in self.log():
            # The port was not the reason: perhaps a part of the template was removed.
            shutil.rmtree(template, ignore_errors=True)
            shutil.rmtree(data, ignore_errors=True)
        if data.exists():
            return
        if not self._copied(template, data):
            shutil.rmtree(data, ignore_errors=True)
            self._initdb(data)
            self._keep(data, template)

    def _template(self):
        """Where a data directory fresh from initdb is kept: one per boot, user and PostgreSQL."""
        binary = (self.binaries() / "postgres").stat()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        name = f"tickwheel-template-{os.geteuid()}-{boot}-{binary.st_mtime_ns:x}"
        return Path(tempfile.gettempdir(), name)

    def _copied(self, template, data):
        """Whether `data` is now a copy of the template; no, when that is missing or not ours."""
        owner = self._account().pw_uid if ROOT else os.geteuid()
        try:
            if template.lstat().st_uid != owner:
                return False
        except FileNotFoundError:
            return False
        copy = subprocess.run(["cp", "-a", template, data], capture_output=True, check=False)
        return copy.returncode == 0

    def _initdb(self, data):
        argv = [self.binaries() / "initdb", "-D", data, "-U", "tickwheel", "-A", "trust"]
        argv += ["-E", "UTF8", "--locale=C.UTF-8", "--no-sync", "--no-instructions"]
        with (self.directory / "log").open("ab") as log:
            user = self.user if ROOT else ""
            made = _spawn([str(part) for part in argv], user, signal.SIGKILL, log)
        if made.wait(PATIENCE):
            raise RuntimeError(f"initdb failed:\n{self.log()}")

    def _keep(self, data, template):
        """Leave a copy for the next server. It appears whole, by one rename; the first one wins."""
        scratch = Path(tempfile.mkdtemp(prefix=f"{template.name}-"))
        try:
            subprocess.run(["cp", "-a", data, scratch / "data"], capture_output=True, check=True)
            (scratch / "data").rename(template)
        except (OSError, subprocess.CalledProcessError):
            pass  # another run was faster, or the disk is full
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


class PostgresStandby(PostgresServer):
    """A copy of a running server, which follows it until `promote`."""

    def __init__(self, primary, **options):
        super().__init__(**options)
        self.primary = primary

    def prepare(self, attempt):
        data = self.directory / "data"
        if data.exists():
            return
        argv = [self.binaries() / "pg_basebackup", "-D", data, "-d", self.primary.url]
        argv += ["-c", "fast", "-X", "stream", "--write-recovery-conf", "--no-sync"]
        with (self.directory / "log").open("ab") as log:
            user = self.user if ROOT else ""
            made = _spawn([str(part) for part in argv], user, signal.SIGKILL, log)
        if made.wait(PATIENCE):
            raise RuntimeError(f"pg_basebackup failed:\n{self.log()}")

    def start(self):
        """Start it; the first time, return when its primary waits for it at each commit."""
        first = not self._settled
        super().start()
        if first:
            self.primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            self.primary.execute("SELECT pg_reload_conf()")
            states = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
            wait_until(lambda: self.primary.execute(states) == "1", "the standby is synchronous")
        return self


class ZooKeeperServer(Server):
    """ZooKeeper: one server alone, or with `number` one of an ensemble that `options` name."""

    name = "zookeeper"
    package = "libzookeeper-java libslf4j-java default-jre-headless"
    user = "nobody"
    jars = ("zookeeper", "slf4j-simple", "netty-codec")  # the last for TLS

    def __init__(self, *, number=0, **options):
        super().__init__(**options)
        self.number = number

    @property
    def address(self):
        return f"{self.host}:{self.port}"

    def binaries(self):
        missing = [one for one in self.jars if not Path(f"/usr/share/java/{one}.jar").exists()]
        java = shutil.which("java")
        return java if java and not missing else self.missing()

    def prepare(self, attempt):
        settings = {
            "tickTime": 200, "initLimit": 50, "syncLimit": 25, "dataDir": self.directory / "data",
            "clientPort": self.port, "clientPortAddress": self.host, "maxClientCnxns": 0,
            "minSessionTimeout": 400, "maxSessionTimeout": 60000, "admin.enableServer": "false",
            "4lw.commands.whitelist": "*", **self.options,
        }  # fmt: skip
        text = "".join(f"{name}={value}\n" for name, value in settings.items())
        (self.directory / "zoo.cfg").write_text(text)
        (self.directory / "zoo.cfg").chmod(0o644)
        if self.number:
            data = self.directory / "data"
            data.mkdir(exist_ok=True)
            (data / "myid").write_text(f"{self.number}\n")
            for path in (data, data / "myid"):
                self.own(path)

    def argv(self):
        return [
            self.binaries(), "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx128m",
            "-XX:-UsePerfData", "-Dzookeeper.admin.enableServer=false",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
            "-cp", ":".join(f"/usr/share/java/{one}.jar" for one in self.jars),
            "org.apache.zookeeper.server.quorum.QuorumPeerMain", self.directory / "zoo.cfg",
        ]  # fmt: skip

    def ready(self):
        try:
            return "Mode:" in self.ask("srvr")
        except OSError:
            return False

    def ask(self, word):
        """Send a command of four letters, and return the answer."""
        with socket.create_connection((self.host, self.port), timeout=1) as connection:
            connection.sendall(word.encode())
            return connection.recv(65536).decode()


class RedisServer(Server):
    """Redis with an append-only file: what it has answered survives kill -9 of the server.

    `durable=True` makes it wait for the disk as well.
    """

    name = "redis"
    package = "redis-server"
    user = "redis"

    @property
    def url(self):
        return self.url_for(0)

    def url_for(self, database):
        return f"redis://127.0.0.1:{self.port}/{database}"

    def execute(self, *words, timeout=PATIENCE):
        """Send one command of plain words, and return what it answered, raw."""
        with socket.create_connection(("127.0.0.1", self.port), timeout) as connection:
            connection.sendall(" ".join(words).encode() + b"\r\nQUIT\r\n")
            said = b""
            while part := connection.recv(65536):
                said += part
        return said.removesuffix(b"+OK\r\n").decode()

    def binaries(self):
        return Path(shutil.which("redis-server") or self.missing()).parent

    def argv(self):
        settings = {
            "port": self.port,
            "bind": "127.0.0.1",
            "dir": self.directory,
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always" if self.durable else "no",
        } | self.options
        flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
        return [self.binaries() / "redis-server", *flags]

    def ready(self):
        try:
            said = self.execute("INFO", timeout=1)  # whoever has the port may be silent
        except OSError:
            return False
        return f"process_id:{self._process.pid}\r\n" in said and "\r\nloading:0\r\n" in said


class PgBouncerServer(Server):
    """PgBouncer before a PostgreSQL: whoever comes is its user `tickwheel`.

    `options` are settings, as in `options={"pool_mode": "transaction"}`.
    """

    name = "pgbouncer"
    package = "pgbouncer"
    user = "postgres"

    def __init__(self, postgres, **options):
        super().__init__(**options)
        self.postgres = postgres

    def url_for(self, database):
        return f"postgresql://tickwheel@127.0.0.1:{self.port}/{database}"

    def binaries(self):
        found = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
        return Path(found or self.missing()).parent

    def version(self):
        """Return major and minor version."""
        said = subprocess.check_output([self.binaries() / "pgbouncer", "--version"], text=True)
        return tuple(map(int, said.split()[1].split(".")[:2]))

    def argv(self):
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "admin_users": "tickwheel",
            "pidfile": self.directory / "pid",
        } | self.options
        lines = ["[databases]", f"* = host=127.0.0.1 port={self.postgres.port} user=tickwheel"]
        lines += ["[pgbouncer]", *(f"{name} = {value}" for name, value in settings.items())]
        configuration = self.directory / "pgbouncer.ini"
        configuration.write_text("\n".join(lines) + "\n")
        self.own(configuration)
        return [self.binaries() / "pgbouncer", configuration]

    def ready(self):
        try:
            if (self.directory / "pid").read_text().strip() != str(self._process.pid):
                return False
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

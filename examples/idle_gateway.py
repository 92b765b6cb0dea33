"""A gateway that marks silent users offline, and a client that loads it.

Each packet is one `touch` of an `IdleTracker`, which runs on an `AsyncTimer`; silent users arrive
in batches, one per tick. The client is a separate process: it connects, keeps most of the users
talking and lets some fall silent. The gateway keeps its own record of each user's last packet, and
checks that every silent user was reported in time, and no other. Otherwise it exits with code 1.

    python examples/idle_gateway.py
    python examples/idle_gateway.py --connections 100000 --timeout 30 --rate 3000 --silent 1000
"""

import argparse
import asyncio
import contextlib
import random
import resource
import socket
import sys
import time
from collections import Counter

import tickwheel

SPARE = 100  # file descriptors that are not connections
PER_ADDRESS = 10_000  # connections to one loopback address, whose ports are limited
AT_ONCE = 10  # new connections before the next packets: more would overflow the accept queue
BEAT = 0.01  # seconds between two clock reads, to detect a stalled machine
MACHINE = 0.2  # seconds that a busy machine may add to one tick
PATIENCE = 5.0  # seconds: a delayed client lets its users fall silent late
STARTED = time.monotonic()


def say(text):
    """Print a message with the time."""
    print(f"{time.monotonic() - STARTED:6.2f} s  {text}", flush=True)


class Stopwatch:
    """Adds up the time spent in calls, including its own cost."""

    def __init__(self):
        self.seconds = 0.0

    def measure(self, function):
        """Return a wrapper of `function` that measures its time."""

        def call(*args):
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - start

        return call


class Pulse:
    """Reads the clock periodically, to detect when the process could not run."""

    def __init__(self):
        self.longest = 0.0

    async def beat(self):
        """Record the longest time in which nothing ran here."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(BEAT)
            self.longest = max(self.longest, time.monotonic() - before)


class MeasuredTimer(tickwheel.AsyncTimer):
    """An `AsyncTimer` that measures its callbacks."""

    def __init__(self, stopwatch):
        super().__init__()
        self.stopwatch = stopwatch

    def call_at(self, when, callback, /, *args):
        """Schedule a callback, and measure its time."""
        return super().call_at(when, self.stopwatch.measure(callback), *args)


class Gateway:
    """The connected users, the online users, and the time of each user's last packet."""

    def __init__(self, timeout, tick):
        self.stopwatch = Stopwatch()
        self.pulse = Pulse()
        self.timer = MeasuredTimer(self.stopwatch)
        self.idle = tickwheel.IdleTracker(timeout, self.offline, timer=self.timer, tick=tick)
        self.touch = self.stopwatch.measure(self.idle.touch)
        self.heard = {}  # the record to compare with: user -> time of the last packet
        self.reports = []  # (user, seconds of silence)
        self.batches = 0
        self.packets = 0

    def packet(self, user):
        """Record a packet of a user."""
        self.heard[user] = time.monotonic()
        self.packets += 1
        self.touch(user)

    def offline(self, users):
        """Record all users that went idle in one tick."""
        now = time.monotonic()
        self.batches += 1
        self.reports += [(user, now - self.heard[user]) for user in users]


class Connection(asyncio.Protocol):
    """One user: the first packet contains its number, and every packet shows that it is alive."""

    def __init__(self, gateway):
        self.gateway = gateway
        self.user = None

    def data_received(self, data):
        """Count any data as a packet."""
        if self.user is None:
            self.user = int(data.split()[0])
        self.gateway.packet(self.user)

    def connection_lost(self, _):
        """Discard the user: a disconnect is not silence."""
        self.gateway.idle.discard(self.user)


async def serve(args):
    """Run the gateway and its client, and return whether every promise was kept."""
    loop = asyncio.get_running_loop()
    gateway = Gateway(args.timeout, args.tick)
    pulse = asyncio.create_task(gateway.pulse.beat())
    hosts = [f"127.0.0.{n + 1}" for n in range(-(-args.connections // PER_ADDRESS))]
    servers, port = [], 0
    for host in hosts:
        make = loop.create_server(lambda: Connection(gateway), host, port, backlog=4096)
        servers.append(await make)
        port = servers[0].sockets[0].getsockname()[1]
    options = [f"--{name}={getattr(args, name)}" for name in ("connections", "timeout", "rate")]
    command = [sys.executable, __file__, f"--client={port}", f"--silent={args.silent}", *options]
    client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    if not await client.stdout.readline():
        raise RuntimeError("the client has failed")
    while len(gateway.idle) + len(gateway.reports) < args.connections:
        await asyncio.sleep(0.05)
    say(f"{args.connections:,} users online, on {len(hosts)} addresses; {args.silent:,} go silent")

    packets, start, cpu = gateway.packets, time.monotonic(), time.process_time()
    spent = gateway.stopwatch.seconds
    await asyncio.sleep(spread(args.timeout) + args.timeout + args.tick)
    patience = time.monotonic() + PATIENCE
    while len(gateway.reports) < args.silent and time.monotonic() < patience:
        await asyncio.sleep(0.05)
    took, cpu = time.monotonic() - start, time.process_time() - cpu
    spent = gateway.stopwatch.seconds - spent
    rate = (gateway.packets - packets) / took
    say(f"{rate:,.0f} packets/s for {took:.1f} s")
    say(f"CPU: gateway {cpu / took:.2%} of a core, of which the tracker {spent / took:.3%}")

    still_online = len(gateway.idle)
    client.kill()
    await client.wait()
    pulse.cancel()
    await gateway.timer.close()
    for server in servers:
        server.close()
    return verdict(args, gateway, still_online)


def verdict(args, gateway, still_online):
    """Compare the reports with the record."""
    users = [user for user, _ in gateway.reports]
    silences = [silence for _, silence in gateway.reports]
    silent = set(who_falls_silent(args))
    latest = args.timeout + args.tick + MACHINE + gateway.pulse.longest
    wrong = {
        "silent and never reported": silent - set(users),
        "reported and alive": set(users) - silent,
        "reported twice": {user for user, times in Counter(users).items() if times > 1},
        "reported early": {user for user, silence in gateway.reports if silence < args.timeout},
        "reported late": {user for user, silence in gateway.reports if silence > latest},
    }
    say(
        f"{len(users):,} reported offline in {gateway.batches} batches, after "
        f"{min(silences, default=0):.3f} to {max(silences, default=0):.3f} s of silence "
        f"(timeout {args.timeout:g} s, tick {args.tick:g} s, the gateway stalled for at most "
        f"{gateway.pulse.longest:.3f} s); {still_online:,} still online"
    )
    for what, which in wrong.items():
        if which:
            say(f"WRONG: {len(which)} {what}: {sorted(which)[:10]}")
    kept = not any(wrong.values()) and still_online == args.connections - args.silent
    say("every silent user was reported in time, and no live one" if kept else "promise broken")
    return kept


def spread(timeout):
    """Return the time until all users that fall silent have done so."""
    return timeout / 2


def who_falls_silent(args):
    """Return random users, in the order in which they fall silent; equal in both processes."""
    return random.Random(1).sample(range(args.connections), args.silent)  # noqa: S311


def talk(args):
    """Act as the users: connect, talk in turn, fall silent one by one, until the gateway exits."""
    limit_files(args.connections)
    users, turn, sent = [], 0, 0
    falling, silent = who_falls_silent(args), set()
    start, connected = time.monotonic(), None
    while True:
        now = time.monotonic()
        for _ in range(min(AT_ONCE, args.connections - len(users))):
            user = socket.socket()
            user.connect((f"127.0.0.{len(users) // PER_ADDRESS + 1}", args.client))
            user.send(b"%d\n" % len(users))
            users.append(user)
        while users and sent < (now - start) * args.rate:
            turn = (turn + 1) % len(users)
            sent += 1
            if turn not in silent:
                users[turn].send(b"ping\n")
        if connected is None and len(users) == args.connections:
            connected = now
            print("connected", flush=True)
        if connected is not None:
            left = 1 - (now - connected) / spread(args.timeout)
            while falling and len(falling) > left * args.silent:
                silent.add(falling.pop())  # it sends no more packets
        time.sleep(0.002)


def limit_files(connections):
    """Raise the limit of open files; return how many connections it allows."""
    wanted = connections + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(wanted, hard)))
        except (ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(connections, soft - SPARE)


def main():
    """Parse the command line, adapt it to the machine, and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds of silence")
    parser.add_argument("--tick", type=float, help="seconds; 1, or a quarter of the timeout")
    parser.add_argument(
        "--rate", type=float, default=500.0, help="packets per second, of all users"
    )
    parser.add_argument("--silent", type=int, default=20, help="number of users that fall silent")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        with contextlib.suppress(ConnectionError):  # the gateway has exited
            talk(args)
        return 0
    args.tick = args.tick or min(1.0, args.timeout / 4)
    allowed = limit_files(args.connections)
    if allowed < args.connections:
        say(f"this machine allows {allowed:,} connections, not {args.connections:,}")
        args.connections = allowed
        args.silent = min(args.silent, allowed)
    spare = max(0.2 * args.timeout, min(1.0, args.timeout / 2))  # a stall that keeps users alive
    needed = args.connections / (args.timeout - spare)
    if args.rate < needed:
        say(f"{args.rate:g} packets/s are too few to keep all users alive: {needed:.0f}")
        args.rate = needed
    return 0 if asyncio.run(serve(args)) else 1


if __name__ == "__main__":
    sys.exit(main())

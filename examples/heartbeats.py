"""Heartbeats: peers must report, and a peer that falls silent is detected.

Each peer has one handle, due when the peer has been silent for too long. A heartbeat moves it:
O(1), with three peers or a million. Peers report from their own threads.

    python examples/heartbeats.py
"""

import threading
import time

import tickwheel

PERIOD = 0.1  # seconds between the heartbeats of a healthy peer
SILENCE = 0.35  # seconds of silence after which a peer is missing
STARTED = time.monotonic()


def say(text):
    """Print a message with the time."""
    print(f"{time.monotonic() - STARTED:5.2f} s  {text}", flush=True)


class Monitor:
    """Tracks which peers are alive."""

    def __init__(self, timer):
        self.timer = timer
        self.deadlines = {}
        self.lost = []

    def heartbeat(self, peer):
        """Record that `peer` is alive now."""
        handle = self.deadlines.get(peer)
        if handle is None or not handle.reschedule(SILENCE):
            self.deadlines[peer] = self.timer.call_later(SILENCE, self.missing, peer)
            say(f"{peer} is {'back' if peer in self.lost else 'here'}")

    def missing(self, peer):
        self.lost.append(peer)
        say(f"{peer} is missing: nothing for {SILENCE} s")

    def leave(self, peer):
        """Remove `peer`, at its own request."""
        self.deadlines.pop(peer).cancel()
        say(f"{peer} has left")


def live(monitor, peer, heartbeats, *, hangs=0.0, crashes=False):
    """Send `heartbeats`, perhaps hang halfway, then leave, unless it crashes."""
    for number in range(heartbeats):
        if number == heartbeats // 2:
            time.sleep(hangs)
        monitor.heartbeat(peer)
        time.sleep(PERIOD)
    if not crashes:
        monitor.leave(peer)


with tickwheel.Timer(tick=0.01) as timer:
    monitor = Monitor(timer)
    peers = [
        threading.Thread(target=live, args=(monitor, "ada", 20)),
        threading.Thread(target=live, args=(monitor, "ben", 3), kwargs={"crashes": True}),
        threading.Thread(target=live, args=(monitor, "cleo", 8), kwargs={"hangs": 0.8}),
    ]
    for peer in peers:
        peer.start()
    for peer in peers:
        peer.join()

    many = Monitor(timer)
    start = time.perf_counter()
    for number in range(100_000):
        many.deadlines[number] = timer.call_later(60, many.missing, number)
    for number in range(100_000):
        many.heartbeat(number)
    took = time.perf_counter() - start
    say(f"100,000 more peers, one heartbeat each: {took:.2f} s")

    lateness = timer.stats()["lateness"]["max"]
    say(f"missing at some time: {', '.join(monitor.lost)}; detected at most {lateness:.3f} s late")
say(f"closed with {len(timer)} pending")

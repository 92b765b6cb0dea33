"""A small broker: produce waits for all replicas, fetch for enough bytes, delete for the followers.

Each of these is an operation in a purgatory. It ends once: when its condition holds, which is
checked whenever its topic changes, or at its deadline with the timeout answer. One thread per
connection, one line per request:

    produce TOPIC TIMEOUT_MS DATA              -> ok OFFSET             | timeout OFFSET
    fetch TOPIC OFFSET MIN_BYTES TIMEOUT_MS    -> ok NEXT_OFFSET DATA   | timeout NEXT_OFFSET DATA
    delete TOPIC TIMEOUT_MS                    -> ok                    | timeout
    replica NAME TOPIC OFFSET                  -> ok      (follower NAME has all before OFFSET)
    forget NAME TOPIC                          -> ok      (follower NAME has deleted TOPIC)

Requests that are waiting when the broker shuts down get the answer `shutdown`.

    python examples/broker.py
"""

import socket
import socketserver
import threading
import time

import tickwheel

STARTED = time.monotonic()


def say(text):
    """Print a message with the time."""
    print(f"{time.monotonic() - STARTED:5.2f} s  {text}", flush=True)


class Topic:
    """A topic: its messages, each follower's offset, and the followers that have deleted it."""

    def __init__(self, followers):
        self.messages = []
        self.replicated = dict.fromkeys(followers, 0)
        self.forgotten = set()
        self.deleted = False


class Request(tickwheel.DelayedOperation):
    """The base of all three requests: a broker, a topic, and an answer for the connection."""

    def __init__(self, broker, topic, timeout_ms):
        super().__init__(int(timeout_ms) / 1000)
        self.broker = broker
        self.topic = broker.topic(topic)
        self.answered = threading.Event()
        self.answer = ""

    def try_complete(self):
        return (self.topic.deleted or self.holds()) and self.force_complete()

    def holds(self):
        """Return whether the condition holds."""
        raise NotImplementedError

    def result(self):
        """Return the rest of the answer, after the status."""
        return ""

    def on_complete(self):
        status = "ok" if self.holds() else "gone" if self.topic.deleted else "timeout"
        self.answer = f"{status} {self.result()}".strip()
        self.answered.set()

    def on_expiration(self):
        self.broker.timeouts += 1


class Produce(Request):
    """acks=all: complete when every follower has the message."""

    def __init__(self, broker, topic, timeout_ms, data):
        super().__init__(broker, topic, timeout_ms)
        self.offset = len(self.topic.messages)
        self.topic.messages.append(data)

    def holds(self):
        return min(self.topic.replicated.values()) > self.offset

    def result(self):
        return str(self.offset)


class Fetch(Request):
    """Long polling: complete when there are at least `min_bytes` after `offset`."""

    def __init__(self, broker, topic, offset, min_bytes, timeout_ms):
        super().__init__(broker, topic, timeout_ms)
        self.offset = int(offset)
        self.min_bytes = int(min_bytes)

    def holds(self):
        return sum(map(len, self.topic.messages[self.offset :])) >= self.min_bytes

    def result(self):
        messages = self.topic.messages[self.offset :]
        return f"{self.offset + len(messages)} {','.join(messages)}"


class Delete(Request):
    """Complete when every follower has also deleted the topic."""

    def holds(self):
        return self.topic.forgotten >= self.topic.replicated.keys()


class Broker:
    """Topics, and the requests that wait for changes to them."""

    def __init__(self, followers=("f1", "f2")):
        self.followers = followers
        self.topics = {}
        self.timeouts = 0
        self.lock = threading.Lock()
        self.waiting = tickwheel.Purgatory("requests")
        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Connection)
        self.server.daemon_threads = True
        self.server.broker = self
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def topic(self, name):
        """Return the topic of that name; create it if it is new."""
        return self.topics.setdefault(name, Topic(self.followers))

    def handle(self, line):
        """Answer one request; a waiting request blocks only its own connection."""
        verb, *words = line.split(" ")
        try:
            return getattr(self, f"do_{verb}")(*words)
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            return f"error {error}"
        except tickwheel.TimerClosed:
            return "shutdown"

    def do_produce(self, topic, timeout_ms, *data):
        """Append, notify requests that wait for bytes, then wait for the followers."""
        with self.lock:
            produce = Produce(self, topic, timeout_ms, " ".join(data))
        # Not under the lock: a check runs conditions of other requests.
        self.waiting.check_and_complete(("bytes", topic))
        return self.ask(produce, ("replicas", topic))

    def do_fetch(self, topic, offset, min_bytes, timeout_ms):
        """Wait until there is enough to read."""
        return self.ask(Fetch(self, topic, offset, min_bytes, timeout_ms), ("bytes", topic))

    def do_delete(self, topic, timeout_ms):
        """Wait until the followers have deleted it, then drop it and notify waiting requests."""
        delete = Delete(self, topic, timeout_ms)
        answer = self.ask(delete, ("forgotten", topic))
        if answer == "ok":
            with self.lock:
                self.topics.pop(topic, None)
            delete.topic.deleted = True
            for what in ("bytes", "replicas"):
                self.waiting.check_and_complete((what, topic))
        return answer

    def do_replica(self, name, topic, offset):
        """Record a follower's offset."""
        replicated = self.topic(topic).replicated
        replicated[name] = max(replicated[name], int(offset))
        self.waiting.check_and_complete(("replicas", topic))
        return "ok"

    def do_forget(self, name, topic):
        """Record that a follower has deleted the topic."""
        self.topic(topic).forgotten.add(name)
        self.waiting.check_and_complete(("forgotten", topic))
        return "ok"

    def ask(self, request, key):
        """Put `request` into the purgatory, and wait for its answer."""
        self.waiting.try_complete_else_watch(request, [key])
        request.answered.wait()
        return request.answer

    def close(self):
        """Stop the server, and answer all waiting requests."""
        self.server.shutdown()
        for request in self.waiting.close():
            request.answer = "shutdown"
            request.answered.set()
        self.server.server_close()


class Connection(socketserver.StreamRequestHandler):
    """One client: a line, an answer, until it disconnects."""

    def handle(self):
        for line in self.rfile:
            answer = self.server.broker.handle(line.decode().strip())
            self.wfile.write(answer.encode() + b"\n")


def call(port, line):
    """Send one request on a new connection, and return the answer."""
    with socket.create_connection(("127.0.0.1", port)) as plain, plain.makefile("rw") as stream:
        stream.write(line + "\n")
        stream.flush()
        return stream.readline().strip()


def in_background(port, who, line):
    """Send a request that may wait, and print its answer when it comes."""

    def wait():
        say(f"{who} gets:  {call(port, line)}")

    say(f"{who} sends: {line}")
    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)  # so that the lines are printed in order
    return thread


def main():
    """Show an ack, a long poll and a delete, each in time and too late; then a shutdown."""
    broker = Broker()
    port = broker.port
    produce = in_background(port, "producer", "produce orders 5000 first order")
    say(f"follower f1 has it: {call(port, 'replica f1 orders 1')}")
    say(f"follower f2 has it: {call(port, 'replica f2 orders 1')}")
    produce.join()
    in_background(port, "producer", "produce orders 300 second order").join()

    fetch = in_background(port, "consumer", "fetch orders 2 10 5000")
    late = in_background(port, "producer", "produce orders 300 five!")
    in_background(port, "producer", "produce orders 300 and five more").join()
    fetch.join()
    late.join()
    in_background(port, "consumer", "fetch orders 4 10 300").join()

    in_background(port, "admin", "delete orders 300").join()
    delete = in_background(port, "admin", "delete orders 5000")
    fetch = in_background(port, "consumer", "fetch orders 4 10 5000")
    for name in broker.followers:
        say(f"follower {name} forgets: {call(port, f'forget {name} orders')}")
    delete.join()
    fetch.join()

    fetch = in_background(port, "consumer", "fetch payments 0 10 60000")
    stats = broker.waiting.stats()
    broker.close()
    fetch.join()
    say(f"{stats['completed']} completed, {stats['expired']} timed out, {stats['watched']} waiting")


if __name__ == "__main__":
    main()

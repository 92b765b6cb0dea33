"""A receiver of a server's calls, on Python's own HTTP server: it prints each call.

    python examples/http_receiver.py

It listens on http://127.0.0.1:8000/ (another port: `python examples/http_receiver.py 8001`). With
TICKWHEEL_WEBHOOK_SECRET in the environment it accepts signed calls only. It processes a call to `/`
at once and answers 200; it answers 202 to `/?feedback=1`, which waits for `tickwheel feedback`.
"""

import argparse
import os
import sys
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tickwheel.receiver import Accepted, Receiver

SECRET = os.environ.get("TICKWHEEL_WEBHOOK_SECRET")
receiver = Receiver(SECRET) if SECRET else Receiver(unsigned=True)


def work(delivery):
    """Process a task: print it. The return value is the task's result."""
    late = (datetime.now(UTC) - delivery.due_at).total_seconds()
    print(
        f"{delivery.service}: {delivery.payload!r}, attempt {delivery.attempt} of task"
        f" {delivery.task_id}, {late * 1000:.0f} ms after it was due",
        flush=True,
    )
    return {"received": delivery.payload}


def accept(delivery):
    """Accept a task for later, and print how to report its outcome."""
    work(delivery)
    print(
        f"then: tickwheel feedback {delivery.task_id} finished --attempt {delivery.attempt}",
        flush=True,
    )
    return Accepted()


class Calls(BaseHTTPRequestHandler):
    """Handles the server's calls."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        """Verify a call, process it, and answer."""
        length = self.headers.get("content-length", "")
        if not length.isdigit() or int(length) > receiver.max_body:
            self.close_connection = True
            self.send_error(413)
            return
        body = self.rfile.read(int(length))
        later = "feedback" in parse_qs(urlsplit(self.path).query)
        reply = receiver.answer(self.headers.items(), body, accept if later else work)
        if reply.status >= 400:
            print(f"refused, {reply.status}: {reply.body.decode()}", flush=True)
        self.send_response(reply.status)
        for name, value in reply.headers:
            self.send_header(name, value)
        if reply.status != 204:
            self.send_header("content-length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body)

    def log_message(self, *_):
        """Log nothing: the calls are already printed."""


class Server(ThreadingHTTPServer):
    """A server with a thread per connection."""

    request_queue_size = 1024  # connections in the accept queue: many tasks come due together


def main():
    """Listen until Ctrl-C."""
    parser = argparse.ArgumentParser(description="Receive a server's calls, and print them.")
    parser.add_argument("port", nargs="?", type=int, default=8000, help="default: %(default)s")
    port = parser.parse_args().port
    try:
        server = Server(("127.0.0.1", port), Calls)
    except (OSError, OverflowError) as error:
        sys.exit(f"cannot listen on port {port}: {error}")
    with server:
        kind = "signed calls" if SECRET else "any call, signed or not,"
        print(f"receiving {kind} on http://127.0.0.1:{server.server_port}/", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("no more calls")


if __name__ == "__main__":
    main()

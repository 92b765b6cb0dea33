"""The broker of examples/, driven by plain sockets: ack, timeout, long poll, delete, shutdown."""

import importlib.util
import socket
import threading
import time
from pathlib import Path

import pytest

from stage import LONG

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "broker.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("broker", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def broker(example):
    broker = example.Broker()
    yield broker
    broker.close()


class Client:
    """A socket that is read line by line."""

    def __init__(self, broker):
        self.socket = socket.create_connection(("127.0.0.1", broker.port), timeout=LONG)
        self.lines = self.socket.makefile("r", encoding="utf-8")

    def send(self, line):
        self.socket.sendall(line.encode() + b"\n")

    def answer(self):
        return self.lines.readline().strip()

    def ask(self, line):
        self.send(line)
        return self.answer()

    def waits(self):
        """Return whether no answer has arrived yet."""
        self.socket.settimeout(0.1)
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(LONG)


@pytest.fixture
def client(broker):
    clients = []

    def connect():
        clients.append(Client(broker))
        return clients[-1]

    yield connect
    for one in clients:
        one.lines.close()
        one.socket.close()


def test_a_produce_is_acknowledged_when_all_replicas_have_it(client):
    producer, follower = client(), client()
    producer.send("produce orders 30000 first order")
    assert producer.waits()
    assert follower.ask("replica f1 orders 1") == "ok"
    assert producer.waits()
    assert follower.ask("replica f2 orders 1") == "ok"
    assert producer.answer() == "ok 0"


def test_a_produce_that_its_replicas_miss_times_out(client, broker):
    producer, follower = client(), client()
    started = time.monotonic()
    producer.send("produce orders 200 first order")
    assert follower.ask("replica f1 orders 1") == "ok"
    assert producer.answer() == "timeout 0"
    assert time.monotonic() - started >= 0.2
    assert broker.timeouts == 1


def test_a_fetch_waits_for_enough_bytes(client):
    consumer, producer = client(), client()
    consumer.send("fetch orders 0 8 30000")
    producer.send("produce orders 10 five!")
    assert producer.answer() == "timeout 0"
    assert consumer.waits()
    producer.send("produce orders 10 more")
    assert consumer.answer() == "ok 2 five!,more"


def test_a_fetch_that_finds_enough_is_answered_at_once(client):
    one = client()
    assert one.ask("produce orders 10 five!") == "timeout 0"
    assert one.ask("fetch orders 0 5 30000") == "ok 1 five!"


def test_a_fetch_times_out_with_what_there_is(client):
    one = client()
    assert one.ask("produce orders 10 five!") == "timeout 0"
    assert one.ask("fetch orders 0 100 50") == "timeout 1 five!"


def test_a_delete_waits_for_the_followers_and_tells_who_waits_on_the_topic(client, broker):
    admin, follower, consumer, producer = client(), client(), client(), client()
    consumer.send("fetch orders 0 100 30000")
    producer.send("produce orders 30000 data")
    assert producer.waits()
    admin.send("delete orders 30000")
    assert follower.ask("forget f1 orders") == "ok"
    assert admin.waits()
    assert follower.ask("forget f2 orders") == "ok"
    assert admin.answer() == "ok"
    assert consumer.answer() == "gone 1 data"
    assert producer.answer() == "gone 0"
    assert broker.waiting.stats()["watched"] == 0


def test_a_delete_that_a_follower_misses_times_out(client, broker):
    admin, follower = client(), client()
    admin.send("delete orders 100")
    assert follower.ask("forget f1 orders") == "ok"
    assert admin.answer() == "timeout"
    assert "orders" in broker.topics


def test_shutdown_tells_everybody_who_waits_and_nothing_is_left(client, broker):
    waiting = [client() for _ in range(5)]
    for one in waiting:
        one.send("fetch orders 0 100 60000")
    assert waiting[-1].waits()
    while broker.waiting.delayed < len(waiting):
        time.sleep(0.005)
    broker.close()
    assert [one.answer() for one in waiting] == ["shutdown"] * 5
    assert (broker.waiting.watched, broker.waiting.delayed) == (0, 0)
    assert waiting[0].ask("fetch orders 0 100 60000") == "shutdown"
    with pytest.raises(OSError):
        Client(broker)


def test_nonsense_is_answered_and_the_connection_lives(client):
    one = client()
    for line in ("dance", "fetch orders", "fetch orders x 1 1", "replica f9 orders 1", ""):
        assert one.ask(line).startswith("error"), line
    assert one.ask("replica f1 orders 0") == "ok"


def test_many_producers_and_followers_at_once(client, broker):
    answers = []

    def produce():
        one = Client(broker)
        for _ in range(20):
            answers.append(one.ask("produce orders 30000 data"))
        one.lines.close()
        one.socket.close()

    threads = [threading.Thread(target=produce, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    follower, end = client(), time.monotonic() + LONG
    while any(thread.is_alive() for thread in threads):
        assert time.monotonic() < end, "a producer waits for ever"
        for name in broker.followers:
            follower.ask(f"replica {name} orders {len(broker.topic('orders').messages)}")
    assert sorted(answers) == sorted(f"ok {number}" for number in range(160))
    assert broker.waiting.stats()["watched"] == 0

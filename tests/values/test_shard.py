"""The shard of a key, of a request and of a schedule: the same in every process and version."""

from hypothesis import given
from hypothesis import strategies as st

from tickwheel.values.schedule import firing_key, schedule_of
from tickwheel.values.shard import hash_shard, key_shard, request_shard
from tickwheel.values.task import MAX_SHARDS, SHARDS, Idempotency


@given(st.text(), st.integers(1, MAX_SHARDS))
def test_a_hashed_shard_is_one_of_them_and_always_the_same(text, shards):
    shard = hash_shard(text, shards)
    assert 0 <= shard < shards
    assert hash_shard(text, shards) == shard


def test_a_hashed_shard_is_the_same_on_every_node_and_version():
    assert [hash_shard(text, 64) for text in ("", "order:1", "größe")] == [0, 57, 9]


def test_the_shard_of_a_key_is_the_same_on_every_node_and_version():
    pairs = [
        ("mail", "order:1"), ("acme/mail", "order:1"), ("mail", "größe"), ("почта", "注文:🛒"),
        ("a", "bc"), ("ab", "c"),
    ]  # fmt: skip
    assert [key_shard(*pair, 64) for pair in pairs] == [52, 53, 4, 63, 43, 28]
    assert [key_shard(*pair, 4096) for pair in pairs] == [1972, 3381, 1348, 1087, 875, 2140]


def test_the_shard_of_a_request_is_the_same_on_every_node_and_version():
    pairs = [("acme", "k-1"), ("", "k-1"), ("local:", "k-1"), ("größe", "k-1")]
    assert [request_shard(Idempotency(*pair, "any"), 64) for pair in pairs] == [61, 44, 2, 18]


def test_a_firing_is_in_the_shard_of_its_schedule():
    for name in ("nightly", "acme/größe", "schedule:x"):
        for time_ms in (0, 1_800_000_000_000):
            key = firing_key(name, time_ms)
            assert schedule_of(key) == name
            assert key_shard("mail", key, 64) == hash_shard(name, 64)
    assert schedule_of("schedule:nightly") is None


def test_keys_are_spread():
    counts = [0] * SHARDS
    for number in range(64_000):
        counts[key_shard("mail", f"order:{number}", SHARDS)] += 1
    assert min(counts) > 800
    assert max(counts) < 1_200

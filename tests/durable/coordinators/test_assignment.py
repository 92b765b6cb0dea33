"""Assignment of shards: quotas by weight, few moves, and the shards that are lent."""

import math

from hypothesis import given
from hypothesis import strategies as st

from tickwheel.durable.coordinator import ShardRow
from tickwheel.durable.coordinators.assignment import (
    MAX_UNUSABLE,
    announced,
    assign,
    lent_shards,
    runnable,
)

NAMES = [f"n{number}" for number in range(8)]
weights = st.dictionaries(st.sampled_from(NAMES), st.sampled_from([1.0, 2.0, 0.5]), min_size=1)


@given(st.integers(1, 64), weights, weights)
def test_each_shard_has_one_node_and_each_node_its_part(shards, before, after):
    assigned = assign(shards, after, assign(shards, before, {}))
    assert sorted(shard for mine in assigned.values() for shard in mine) == [*range(shards)]
    total = sum(after.values())
    for name, mine in assigned.items():
        assert abs(len(mine) - shards * after[name] / total) < 1


@given(st.integers(1, 64), st.sets(st.sampled_from(NAMES[1:]), min_size=1))
def test_one_node_that_joins_or_leaves_moves_few_shards(shards, others):
    few = assign(shards, dict.fromkeys(others, 1.0), {})
    many = assign(shards, dict.fromkeys([*others, "n0"], 1.0), few)
    most = math.ceil(shards / len(many)) + 1
    assert moves(few, many) <= most
    assert moves(many, assign(shards, dict.fromkeys(others, 1.0), many)) <= most


def moves(before, after):
    owners = {shard: name for name, mine in before.items() for shard in mine}
    return sum(owners[shard] != name for name, mine in after.items() for shard in mine)


def test_nothing_moves_while_the_nodes_stay_the_same():
    before = assign(64, {"a": 1.0, "b": 3.0}, {})
    assert assign(64, {"a": 1.0, "b": 3.0}, before) == before
    assert {name: len(mine) for name, mine in before.items()} == {"a": 16, "b": 48}


def test_without_nodes_there_is_no_assignment():
    assert assign(8, {}, {"gone": [1, 2]}) == {}


def test_a_shard_is_lent_to_one_node_that_has_the_function():
    shards = [ShardRow(number, "abc"[number % 3], 7) for number in range(6)]
    functions = {"a": ["f"], "b": ["f", "g"], "c": []}
    lent = {node: lent_shards(node, functions, shards) for node in "abc"}
    assert lent == {"a": {"f": {2: 7}}, "b": {"f": {5: 7}, "g": {0: 7, 2: 7, 3: 7, 5: 7}}, "c": {}}


def test_a_node_runs_its_functions_and_the_services_that_only_others_cannot_use():
    functions = {"a": ["f"], "b": [], "c": ["s"]}
    unusable = {"a": ["s", "t"], "b": ["t"], "c": ["s", "t"]}
    assert runnable(functions, unusable) == {"a": {"f"}, "b": {"s"}, "c": {"s"}}
    assert runnable({"a": ["f"]}, {"a": []}) == {"a": {"f"}}


def test_a_node_announces_a_bounded_number_of_unusable_services():
    names = [f"s{number:05}" for number in range(2 * MAX_UNUSABLE)]
    assert announced(names[::-1]) == names[:MAX_UNUSABLE]

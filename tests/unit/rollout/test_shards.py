import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.config import GymConfig, ShardConfig
from gymrl.errors import ConfigError, RowTypeError, RowValueError
from gymrl.gym.shards import (
    Shard,
    ShardSet,
    bucket_rows,
    instance_labels,
    plan_shards,
    row_route,
)
from gymrl.types import Row


def row(index, route="math"):
    return Row(
        index=index,
        task_index=index,
        rollout_index=0,
        route=route,
        rollout_id=f"r{index}",
        body=b"{}",
    )


def rows_for(*routes):
    return [row(index, route) for index, route in enumerate(routes)]


def agent(resources="math"):
    return {
        "responses_api_agents": {
            "simple_agent": {
                "entrypoint": "app.py",
                "resources_server": {"type": "resources_servers", "name": resources},
                "model_server": {"type": "responses_api_models", "name": "policy_model"},
            }
        }
    }


SERVERS = {
    "math": {"resources_servers": {"math": {"entrypoint": "app.py"}}},
    "math_agent": agent("math"),
    "code": {"resources_servers": {"code": {"entrypoint": "app.py"}}},
    "code_agent": agent("code"),
    "policy_model": {"responses_api_models": {"vllm_model": {"entrypoint": "app.py"}}},
}


def test_the_agent_is_the_route_and_the_task_source_stands_in_for_it():
    assert row_route({"agent_ref": {"name": "a"}, "task_source": "t"}, 0) == "a"
    assert row_route({"agent_ref": None, "task_source": "t"}, 0) == "t"
    assert row_route({"agent_ref": {"name": None}, "task_source": "t"}, 0) == "t"


@pytest.mark.parametrize(
    "fields", [{}, {"agent_ref": None, "task_source": None}, {"task_source": ""}]
)
def test_a_row_without_a_route_is_told_what_is_missing(fields):
    with pytest.raises(ValueError, match=r"row 5 .*agent_ref\.name or a non-empty task_source"):
        row_route(fields, 5)


@pytest.mark.parametrize("fields", [{"agent_ref": 3}, {"task_source": 3}])
def test_a_route_of_another_type_is_refused(fields):
    with pytest.raises(RowTypeError):
        row_route(fields, 5)


def test_an_unsharded_job_is_one_shard_that_takes_every_route():
    shards = ShardSet([Shard("default", ["handle"])])
    (bucket,) = bucket_rows(rows_for("anything", "else"), shards, 1)
    assert (bucket.label, bucket.handle) == ("default", "handle")
    assert [r.index for r in bucket.rows] == [0, 1]


def test_a_shard_with_replicas_numbers_them():
    assert instance_labels("math", 1) == ("math",)
    assert instance_labels("math", 3) == ("math/0", "math/1", "math/2")


def test_replicas_take_turns_by_whole_group():
    shards = ShardSet([Shard("math", ["a", "b"], ["math"])])
    buckets = bucket_rows(rows_for(*["math"] * 10), shards, 2)
    assert [(b.label, [r.index for r in b.rows]) for b in buckets] == [
        ("math/0", [0, 1, 4, 5, 8, 9]),
        ("math/1", [2, 3, 6, 7]),
    ]


def test_turns_go_on_over_calls():
    shards = ShardSet([Shard("math", ["a", "b"], ["math"])])
    first = bucket_rows(rows_for("math"), shards, 1)
    second = bucket_rows(rows_for("math"), shards, 1)
    assert [bucket.label for bucket in first + second] == ["math/0", "math/1"]


def test_buckets_come_in_first_use_order_and_idle_instances_are_left_out():
    shards = ShardSet(
        [Shard("code", ["c"], ["code"]), Shard("math", ["m"], ["math"]), Shard("x", ["x"], ["x"])]
    )
    buckets = bucket_rows(rows_for("math", "code", "math"), shards, 1)
    assert [(b.label, [r.index for r in b.rows]) for b in buckets] == [
        ("math", [0, 2]),
        ("code", [1]),
    ]


def test_a_group_that_mixes_routes_is_refused_also_within_one_shard():
    shards = ShardSet([Shard("both", ["h"], ["math", "code"])])
    with pytest.raises(RowValueError, match="rows 2 to 3 are one group but mix routes"):
        bucket_rows(rows_for("math", "math", "math", "code"), shards, 2)


def test_a_route_that_no_shard_hosts_is_refused_listing_the_hosted_ones_sorted():
    shards = ShardSet([Shard("b", ["h"], ["zeta", "alpha"]), Shard("a", ["h"], ["mid"])])
    with pytest.raises(
        ValueError, match=r"row 1: no shard hosts 'nope' \(hosted: alpha, mid, zeta\)"
    ):
        bucket_rows(rows_for("mid", "nope"), shards, 1)


def test_a_refused_batch_takes_no_turns():
    shards = ShardSet([Shard("math", ["a", "b"], ["math"])])
    with pytest.raises(RowValueError):
        bucket_rows(rows_for("math", "nope"), shards, 1)
    (bucket,) = bucket_rows(rows_for("math"), shards, 1)
    assert bucket.label == "math/0"


@pytest.mark.parametrize("size", [0, -1, 2])
def test_rows_that_are_not_whole_groups_are_refused(size):
    with pytest.raises(RowValueError, match="whole groups"):
        bucket_rows(rows_for("m", "m", "m"), ShardSet([Shard("s", ["h"])]), size)


def test_two_shards_that_host_one_route_are_refused_naming_both():
    with pytest.raises(ConfigError, match="'math' is hosted by shard 'one' and by shard 'two'"):
        ShardSet([Shard("one", ["h"], ["math"]), Shard("two", ["h"], ["math", "code"])])


def test_a_shard_set_needs_shards_and_a_shard_needs_a_worker():
    with pytest.raises(ConfigError, match="at least one shard"):
        ShardSet([])
    with pytest.raises(ConfigError, match="'empty' has no worker"):
        Shard("empty", [])


def test_turns_are_fair_under_concurrent_callers():
    shard = Shard("math", list(range(4)), ["math"])
    seen = Counter()
    lock = threading.Lock()

    def take():
        mine = [shard.next_instance()[0] for _ in range(200)]
        with lock:
            seen.update(mine)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"math/0": 400, "math/1": 400, "math/2": 400, "math/3": 400}


def test_a_replica_to_avoid_is_passed_over_where_there_is_another():
    two = Shard("two", ["a", "b"])
    assert {two.next_instance(avoid="two/0")[0] for _ in range(4)} == {"two/1"}
    one = Shard("one", ["a"])
    assert one.next_instance(avoid="one") == ("one", "a")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from("abc"), max_size=12), st.integers(1, 3), st.integers(1, 4))
def test_bucketing_keeps_every_row_once_and_every_group_whole(routes, replicas, size):
    rows = rows_for(*[route for route in routes for _ in range(size)])
    shards = ShardSet([Shard(name, list(range(replicas)), [name]) for name in "abc"])
    buckets = bucket_rows(rows, shards, size)
    assert sorted(r.index for bucket in buckets for r in bucket.rows) == list(range(len(rows)))
    home = {r.index: bucket.label for bucket in buckets for r in bucket.rows}
    for start in range(0, len(rows), size):
        assert len({home[index] for index in range(start, start + size)}) == 1
    for name in "abc":
        shares = Counter(label for label in home.values() if label.split("/")[0] == name)
        if shares:
            assert max(shares.values()) - min(shares.values()) <= size


def plan(**shards):
    return plan_shards(GymConfig(servers=SERVERS), shards)


def test_a_plan_without_shards_is_the_whole_configuration():
    config = GymConfig(servers=SERVERS)
    (shard,) = plan_shards(config, {}, replicas=2)
    assert shard.labels == ("default/0", "default/1")
    assert shard.config is config


def test_each_shard_gets_its_slice_and_a_copy_of_the_model_servers():
    math, code = plan(
        math=ShardConfig(servers=("math", "math_agent")),
        code=ShardConfig(servers=("code", "code_agent"), replicas=2),
    )
    assert set(math.config.servers) == {"math", "math_agent", "policy_model"}
    assert set(code.config.servers) == {"code", "code_agent", "policy_model"}
    assert (math.labels, code.labels) == (("math",), ("code/0", "code/1"))


ALL = ("math", "math_agent", "code", "code_agent")


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ({"a": ("nope",)}, "no server 'nope'"),
        ({"a": ALL, "b": ("math",)}, "'math' is hosted by 'a' and by 'b'"),
        ({"a": ("math", "math_agent")}, "no shard lists code, code_agent"),
        (
            {"a": ("math", "code_agent"), "b": ("code", "math_agent")},
            "lives in another shard",
        ),
        ({"a/b": ALL}, "no name for a shard"),
        ({"": ALL}, "no name for a shard"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(shards, message):
    with pytest.raises(ConfigError, match=message):
        plan(**{name: ShardConfig(servers=servers) for name, servers in shards.items()})


def test_servers_of_someone_else_are_not_cut_into_shards():
    with pytest.raises(ConfigError, match="registry_url"):
        plan_shards(
            GymConfig(registry_url="http://127.0.0.1:1"), {"a": ShardConfig(servers=("math",))}
        )


def test_shards_want_instances_that_are_written_out():
    config = GymConfig(servers={**SERVERS, "config_paths": ["a.yaml"]}, gym_python="python")
    with pytest.raises(ConfigError, match="config_paths declares is known only once Gym has read"):
        plan_shards(config, {"all": ShardConfig(servers=("math", "math_agent"))})

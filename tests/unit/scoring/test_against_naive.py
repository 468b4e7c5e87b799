"""The scoring room against a second, deliberately plain writing of the same rules.

Nothing of :mod:`gymrl.scoring` but its entry points is used here: every formula is written again,
for one rollout at a time, with the standard library.
"""

import collections
import json
import statistics

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gymrl.scoring import GroupStats, ScoringConfig, resolve_scoring, score
from gymrl.types import Failure
from tests.unit.scoring.samples import failure, group, message, reasoning, result, trajectory

amounts = st.sampled_from([0.0, 0.0, 0.125, 0.5, 1.25])
CHANNELS = ("reasoning", "answer", "total")
rules = st.fixed_dictionaries(
    {
        "length_type": st.just("chars"),
        **{f"{c}_bonus": amounts for c in CHANNELS},
        **{f"longest_{c}_penalty": amounts for c in CHANNELS},
        **{f"group_{c}_length_penalty_coeff": amounts for c in CHANNELS},
        **{f"{c}_zmad_penalty": amounts for c in CHANNELS},
        **{f"{c}_zmad_threshold": st.sampled_from([0.0, 0.5, 2.0]) for c in CHANNELS},
        **{f"profile_band_{c}": st.booleans() for c in CHANNELS},
        "profiled_length_penalty": amounts,
        "profiled_length_n_std": st.sampled_from([0.0, 1.0]),
        "profiled_length_min_samples": st.sampled_from([1, 2, 4]),
        "pass_rate_length_penalty_weight": amounts,
        "group_length_penalty_profile_gate": st.booleans(),
        "group_length_penalty_profile_gate_channel": st.sampled_from(CHANNELS),
        "group_length_penalty_profile_gate_field": st.sampled_from(["a", "b", "f"]),
        "group_length_penalty_profile_gate_positive_only": st.booleans(),
    }
)
bands = st.builds(
    lambda a, width, f: {"a": a, "b": a + width, "f": f},
    st.integers(0, 20),
    st.integers(1, 20),
    st.sampled_from([0.0, 0.25, 1.0]),
)
rows = st.fixed_dictionaries(
    {},
    optional={
        "profile_band": st.dictionaries(st.sampled_from(CHANNELS), bands),
        "profiled_rewards": st.just([1, 0, 1, 1]),
        "profiled_output_lengths": st.lists(st.integers(1, 40), min_size=4, max_size=4),
    },
)
rollouts = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0]), st.integers(0, 30), st.integers(0, 30)),
    min_size=1,
    max_size=7,
)


def naive_shortest(p, sizes, passed, me):
    found = [i for i in passed if sizes[i] > 0]
    if not found:
        return 0.0
    least = min(sizes[i] for i in found)
    first = next(i for i in found if sizes[i] == least)
    return p if first == me else 0.0


def naive_longest(p, sizes, passed, me):
    found = [i for i in passed if sizes[i] > 0]
    if len(found) < 2:
        return 0.0
    most = max(sizes[i] for i in found)
    first = next(i for i in found if sizes[i] == most)
    return -p if first == me else 0.0


def naive_relative(p, sizes, passed, me):
    known = [sizes[i] for i in passed]
    if max(known) == min(known):
        return 0.0
    weights = [1 - (n - min(known)) / (max(known) - min(known)) for n in known]
    mine = 1 - (sizes[me] - min(known)) / (max(known) - min(known))
    return p * (mine - sum(weights) / len(weights))


def naive_outlier(p, threshold, sizes, passed, me):
    known = [sizes[i] for i in passed]
    middle = statistics.median(known)
    spread = statistics.median([abs(n - middle) for n in known])
    if threshold <= 0 or spread == 0 or spread < 0.015 * middle:
        return 0.0
    return -p if 0.6745 * (sizes[me] - middle) / spread > threshold else 0.0


def naive_profiled(rule, row, total):
    if "profiled_rewards" not in row or "profiled_output_lengths" not in row:
        return 0.0
    good = [
        n
        for r, n in zip(row["profiled_rewards"], row["profiled_output_lengths"], strict=True)
        if r > 0
    ]
    if len(good) < rule["profiled_length_min_samples"]:
        return 0.0
    limit = statistics.fmean(good) + rule["profiled_length_n_std"] * statistics.pstdev(good)
    # Two writings may round differently at the limit itself; literals cover that case.
    assume(abs(total - limit) > 1e-9)
    return -rule["profiled_length_penalty"] if total >= limit else 0.0


def naive_gate(rule, row, sizes, passed, count):
    if not rule["group_length_penalty_profile_gate"]:
        return True
    channel = rule["group_length_penalty_profile_gate_channel"]
    band = row.get("profile_band", {}).get(channel)
    used = passed if rule["group_length_penalty_profile_gate_positive_only"] else range(count)
    if band is None or not list(used):
        return False
    mean = statistics.fmean([sizes[channel][i] for i in used])
    return mean > band[rule["group_length_penalty_profile_gate_field"]]


def naive_band(length, band):
    if length <= band["a"]:
        return 1.0
    if length >= band["b"]:
        return band["f"]
    return 1 - (length - band["a"]) / (band["b"] - band["a"]) * (1 - band["f"])


def naive_rewards(rule, row, attempts):
    sizes = {
        "reasoning": [r for _, r, _ in attempts],
        "answer": [a for _, _, a in attempts],
        "total": [r + a for _, r, a in attempts],
    }
    passed = [i for i, (reward, _, _) in enumerate(attempts) if reward > 0]
    rewards = []
    for me, (reward, _, _) in enumerate(attempts):
        if reward <= 0:
            rewards.append(reward)
            continue
        value = reward
        for c in CHANNELS:
            value += naive_shortest(rule[f"{c}_bonus"], sizes[c], passed, me)
            value += naive_longest(rule[f"longest_{c}_penalty"], sizes[c], passed, me)
            value += naive_outlier(
                rule[f"{c}_zmad_penalty"], rule[f"{c}_zmad_threshold"], sizes[c], passed, me
            )
            if naive_gate(rule, row, sizes, passed, len(attempts)):
                coefficient = rule[f"group_{c}_length_penalty_coeff"]
                value += naive_relative(coefficient, sizes[c], passed, me)
        value += naive_profiled(rule, row, sizes["total"][me])
        longest = max(sizes["total"][i] for i in passed)
        if longest:
            share = len(passed) / len(attempts) * sizes["total"][me] / longest
            value -= rule["pass_rate_length_penalty_weight"] * share
        value = max(value, 0.0)
        for c in CHANNELS:
            band = row.get("profile_band", {}).get(c)
            if rule[f"profile_band_{c}"] and band:
                value *= naive_band(sizes[c][me], band)
        rewards.append(value)
    return rewards


@settings(max_examples=60, deadline=None)
@given(rules, rows, rollouts)
def test_the_length_rules_agree_with_a_plain_writing(rule, row, attempts):
    samples = [
        trajectory(reward, answer=result(reasoning("r" * r), message("a" * a)))
        for reward, r, a in attempts
    ]
    config = ScoringConfig.from_dict({"length_penalty": {"default": rule}})
    scored = score(group(*samples, body=row), resolve_scoring(config)).group
    assert [t.reward.total for t in scored.trajectories] == pytest.approx(
        naive_rewards(rule, row, attempts), abs=1e-9
    )


# Metrics

spans = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=3)
members = st.one_of(
    st.fixed_dictionaries(
        {
            "agent": st.sampled_from(["math", "code"]),
            "reward": st.sampled_from([0.0, 0.5, 1.0]),
            "spans": spans,
            "extras": st.dictionaries(
                st.sampled_from(["steps", "won", "reward_score_raw", "text"]),
                st.one_of(st.integers(-9, 9), st.booleans(), st.none(), st.just("text")),
            ),
            "reason": st.sampled_from([None, "max_output_tokens", "content_filter"]),
        }
    ),
    st.sampled_from(["RolloutTimeout", "ActorDiedError"]),
)
batches = st.lists(st.lists(members, min_size=1, max_size=4), min_size=1, max_size=4)
LIMIT = 9


def build(member):
    if isinstance(member, str):
        return failure(member)
    return trajectory(
        member["reward"],
        agent=member["agent"],
        pairs=tuple(((1,) * prompt, (2,) * generated) for prompt, generated in member["spans"]),
        answer=result(message("x"), **member["extras"]),
        incomplete_reason=member["reason"],
    )


def describe(name, values):
    ordered = sorted(values)

    def at(percent):
        return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]

    return {
        f"{name}/mean": statistics.fmean(values),
        f"{name}/max": ordered[-1],
        f"{name}/min": ordered[0],
        f"{name}/median": statistics.median(values),
        f"{name}/stddev": statistics.stdev(values) if len(values) > 1 else 0.0,
        f"{name}/p95": at(95),
        f"{name}/p99": at(99),
    }


def naive_metrics(batch):
    """Every metric of the batch in one pass over its samples, groups apart for diagnostics."""
    series = collections.defaultdict(list)
    means = collections.defaultdict(list)
    counts = collections.Counter()
    for one in batch:
        rewards = [member["reward"] for member in one if not isinstance(member, str)]
        for member in one:
            if isinstance(member, str):
                counts["rollout_failures/infra"] += 1
                counts[f"rollout_failures/{member}"] += 1
                continue
            generated = [size for _, size in member["spans"]]
            total = sum(prompt + size for prompt, size in member["spans"])
            cut = total >= LIMIT or member["reason"] == "max_output_tokens"
            series["turns_per_sample"].append(len(generated))
            series["total_tokens_per_sample"].append(total)
            series["gen_tokens_per_sample"].append(sum(generated))
            series["max_gen_tokens_per_turn"].append(max(generated))
            series["total_reward"].append(member["reward"])
            means["mean_gen_tokens_per_sample"].append(sum(generated))
            means["truncation_rate"].append(cut)
            means["natural_termination_rate"].append(not cut)
            series[f"{member['agent']}/reward"].append(member["reward"])
            for name, value in member["extras"].items():
                if isinstance(value, int):
                    series[f"{member['agent']}/{name}"].append(float(value))
                    if name == "reward_score_raw":
                        means[name].append(float(value))
        if rewards:
            means["baseline_reward/pct_0"].append(100 if set(rewards) == {0.0} else 0)
            means["baseline_reward/pct_1"].append(100 if set(rewards) == {1.0} else 0)
            means["baseline_reward/pct_mixed"].append(0 if set(rewards) in ({0.0}, {1.0}) else 100)
            means["group_reward_range/mean"].append(max(rewards) - min(rewards))
            means["group_reward_std/mean"].append(
                statistics.stdev(rewards) if len(rewards) > 1 else 0.0
            )
    expected = {name: statistics.fmean(values) for name, values in means.items()}
    for name, values in series.items():
        expected.update(describe(name, values))
    return {**expected, **counts}


@settings(max_examples=50, deadline=None)
@given(batches)
def test_metrics_of_groups_merge_into_those_of_the_batch(batch):
    scoring = resolve_scoring(ScoringConfig(), max_total_tokens=LIMIT)
    scored = [score(group(*(build(member) for member in one)), scoring) for one in batch]
    merged = GroupStats.merged(out.stats for out in scored).scalars()
    assert merged == pytest.approx(naive_metrics(batch))
    for out, one in zip(scored, batch, strict=True):
        assert out.group.metrics == pytest.approx(naive_metrics([one]))
        assert json.loads(json.dumps(out.group.metrics)) == out.group.metrics
        assert [isinstance(s, Failure) for s in out.group.samples] == [
            isinstance(member, str) for member in one
        ]

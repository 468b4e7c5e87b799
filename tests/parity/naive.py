"""The rules written again, plainly: ``json.loads``, lists and the standard library's statistics.

Nothing of gymrl is used here.
"""

import json
import math
import statistics

LENGTH_REASONS = ("max_output_tokens", "length", "max_tokens", "max_model_len")
SIZES = (
    "turns_per_sample",
    "total_tokens_per_sample",
    "gen_tokens_per_sample",
    "max_gen_tokens_per_turn",
)


class Refused(Exception):
    """The answer is no rollout; the text is the error's name."""


def is_id(value):
    return type(value) is int and 0 <= value < 2**31


def is_finite(value):
    return type(value) in (int, float) and math.isfinite(value)


def episode(body):
    """One answer as a message log of lists, with what is known of its sample."""
    result = json.loads(body)
    if result.get("_ng_failure_class") is not None:
        raise Refused("RolloutDataFailure")
    reward = number(result.get("reward"))
    parts = {name: number(part) for name, part in (result.get("reward_components") or {}).items()}
    if parts and abs(reward - sum(parts.values())) > 1e-5 * abs(reward) + 1e-6:
        raise Refused("RewardContractError")
    if result.get("response") is None:
        raise Refused("GymSchemaError")
    log, seen = [], []
    for item in result["response"]["output"]:
        if not item.get("generation_token_ids"):
            continue
        log += messages(item, seen)
        seen = item["prompt_token_ids"] + item["generation_token_ids"]
    if not log:
        raise Refused("NoGenerationError")
    details = result["response"].get("incomplete_details") or {}
    return {
        "log": log,
        "reward": reward,
        "parts": parts or None,
        "is_cut": details.get("reason") in LENGTH_REASONS,
        "is_masked": result.get("mask_sample") is True
        or (result.get("instance_config") or {}).get("mask_sample") is True,
        "scalars": {
            name: float(value)
            for name, value in result.items()
            if isinstance(value, bool | int | float)
        },
    }


def number(value):
    if isinstance(value, bool) or not is_finite(value):
        raise Refused("RewardContractError")
    return float(value)


def messages(item, seen):
    prompt, sampled = item.get("prompt_token_ids"), item["generation_token_ids"]
    if prompt is None or not all(is_id(token) for token in [*prompt, *sampled]):
        raise Refused("GymSchemaError")
    if prompt[: len(seen)] != seen:
        raise Refused("NonContiguousTokensError")
    logprobs = item.get("generation_log_probs") or []
    if len(logprobs) != len(sampled) or not all(is_finite(value) for value in logprobs):
        raise Refused("BadLogprobsError")
    added = prompt[len(seen) :]
    return [("user", added, [0.0] * len(added)), ("assistant", sampled, logprobs)]


def flat(log):
    """Tokens, mask and log-probabilities of a message log."""
    tokens = [token for _, ids, _ in log for token in ids]
    mask = [role == "assistant" for role, ids, _ in log for _ in ids]
    logprobs = [value for _, _, values in log for value in values]
    return tokens, mask, logprobs


def padded(lists, fill):
    width = max(len(values) for values in lists)
    return [values + [fill] * (width - len(values)) for values in lists]


def batch(samples, agents, limit, pad):
    """The columns and the padded tensors of samples, as lists."""
    flats = [flat(sample["log"]) for sample in samples]
    prompts = [sample["log"][0][1] for sample in samples]
    names = sorted({name for sample in samples for name in sample["parts"] or {}})
    return {
        "agent_ref": [{"type": "responses_api_agents", "name": agent} for agent in agents],
        "length": [len(prompt) for prompt in prompts],
        "loss_multiplier": [1.0 for _ in samples],
        "total_reward": [sample["reward"] for sample in samples],
        "truncated": [
            sample["is_cut"] or len(tokens) >= limit
            for sample, (tokens, _, _) in zip(samples, flats, strict=True)
        ],
        "mask_sample": [sample["is_masked"] for sample in samples],
        "reward_valid": [True for _ in samples],
        **{
            f"reward/{name}": [(sample["parts"] or {}).get(name, 0.0) for sample in samples]
            for name in names
        },
        "input_ids": padded(prompts, pad),
        "token_ids": padded([tokens for tokens, _, _ in flats], pad),
        "token_mask": padded([mask for _, mask, _ in flats], False),
        "generation_logprobs": padded([logprobs for _, _, logprobs in flats], 0.0),
        "lengths": [len(tokens) for tokens, _, _ in flats],
    }


def distribution(name, values):
    ordered = sorted(values)
    last = len(values) - 1
    return {
        f"{name}/mean": math.fsum(values) / len(values),
        f"{name}/max": ordered[-1],
        f"{name}/min": ordered[0],
        f"{name}/median": statistics.median(values),
        f"{name}/stddev": statistics.stdev(values) if last else 0.0,
        f"{name}/p95": ordered[min(len(values) * 95 // 100, last)],
        f"{name}/p99": ordered[min(len(values) * 99 // 100, last)],
    }


def metrics(samples, agents, limit):
    """The metrics of one prompt's unscored samples."""
    generated = [[len(ids) for role, ids, _ in s["log"] if role == "assistant"] for s in samples]
    totals = [sum(len(ids) for _, ids, _ in s["log"]) for s in samples]
    rewards = [s["reward"] for s in samples]
    sizes = ([len(g) for g in generated], totals, [sum(g) for g in generated])
    found = {}
    for name, values in zip(SIZES, (*sizes, [max(g) for g in generated]), strict=True):
        found |= distribution(name, values)
    found |= distribution("total_reward", rewards)
    found["mean_gen_tokens_per_sample"] = statistics.mean(sum(g) for g in generated)
    cut = [s["is_cut"] or n >= limit for s, n in zip(samples, totals, strict=True)]
    found["truncation_rate"] = cut.count(True) / len(cut)
    found["natural_termination_rate"] = cut.count(False) / len(cut)
    for agent in set(agents):
        own = [s["scalars"] for s, a in zip(samples, agents, strict=True) if a == agent]
        for name in {name for scalars in own for name in scalars}:
            values = [scalars[name] for scalars in own if name in scalars]
            found |= distribution(f"{agent}/{name}", values)
    all_wrong, all_right = set(rewards) == {0.0}, set(rewards) == {1.0}
    found["baseline_reward/pct_0"] = 100.0 * all_wrong
    found["baseline_reward/pct_1"] = 100.0 * all_right
    found["baseline_reward/pct_mixed"] = 100.0 - 100.0 * (all_wrong or all_right)
    found["group_reward_std/mean"] = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    found["group_reward_range/mean"] = max(rewards) - min(rewards)
    return found

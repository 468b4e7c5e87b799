"""Random answers of ``/run``: good ones, and ones that are broken in a known way."""

import copy
import json
import math

AGENTS = ("math_agent", "code_agent")
WORDS = ("yes", "no", "4", "so be it", "<think>", "</think>", "<tool_call>", "é€", "")
REASONS = (None, None, None, "max_output_tokens", "length", "content_filter", "max_tokens")


def numbers(rng, low, high, least, most):
    return [rng.randint(low, high) for _ in range(rng.randint(least, most))]


def any_result(rng, *, reward=None):
    """A good answer of one to five turns.

    Args:
        rng: A ``random.Random``.
        reward: None: any, sometimes of several parts.
    """
    output, seen = [], []
    for number in range(rng.randint(1, 5)):
        if number:
            output.append({"type": "function_call_output", "call_id": "c", "output": '{"x": 1}'})
        if rng.random() < 0.3:
            output.append({"type": "reasoning", "summary": [{"text": rng.choice(WORDS)}]})
        prompt = seen + numbers(rng, 0, 40, 0 if number else 1, 5)
        sampled = numbers(rng, 0, 40, 1, 6)
        text = rng.choice(WORDS)
        output.append(
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": text}],
                "prompt_token_ids": prompt,
                "generation_token_ids": sampled,
                "generation_log_probs": [-rng.randint(0, 64) / 16 for _ in sampled],
            }
        )
        seen = prompt + sampled
    details = rng.choice(REASONS)
    result = {
        "responses_create_params": {"input": "ask"},
        "response": {
            "id": "r",
            "output": output,
            "incomplete_details": {"reason": details} if details else None,
        },
        "extracted_answer": rng.choice(WORDS),
        "accuracy": rng.random() < 0.5,
    }
    if rng.random() < 0.5:
        result["steps"] = rng.randint(0, 9)
    result |= flags(rng)
    if reward is not None:
        return result | {"reward": reward}
    if rng.random() < 0.5:
        return result | {"reward": rng.choice([0.0, 1.0, 0.5, -1.0, 1])}
    names = rng.sample(["format", "correct", "brief"], rng.randint(1, 3))
    parts = {name: rng.randint(-8, 8) / 8 for name in names}
    return result | {"reward": math.fsum(parts.values()), "reward_components": parts}


def flags(rng):
    found = {}
    if rng.random() < 0.6:
        found["mask_sample"] = rng.choice([True, False, None])
    if rng.random() < 0.3:
        found["instance_config"] = {"mask_sample": rng.choice([True, False, None])}
    return found


def turns_of(result):
    return [item for item in result["response"]["output"] if "generation_token_ids" in item]


def _break_prefix(rng, result):
    late = turns_of(result)[1:]
    if not late:
        return None
    rng.choice(late)["prompt_token_ids"][0] += 1
    return "NonContiguousTokensError"


def _shorten_prompt(rng, result):
    late = turns_of(result)[1:]
    if not late:
        return None
    item = rng.choice(late)
    before = turns_of(result)[turns_of(result).index(item) - 1]
    item["prompt_token_ids"] = before["prompt_token_ids"] + before["generation_token_ids"][:-1]
    return "NonContiguousTokensError"


def _lose_a_logprob(rng, result):
    rng.choice(turns_of(result))["generation_log_probs"].pop()
    return "BadLogprobsError"


def _null_logprob(rng, result):
    values = rng.choice(turns_of(result))["generation_log_probs"]
    values[rng.randrange(len(values))] = None
    return "BadLogprobsError"


def _no_logprobs(rng, result):
    del rng.choice(turns_of(result))["generation_log_probs"]
    return "BadLogprobsError"


def _no_prompt(rng, result):
    del rng.choice(turns_of(result))["prompt_token_ids"]
    return "GymSchemaError"


def _negative_id(rng, result):
    ids = rng.choice(turns_of(result))["generation_token_ids"]
    ids[rng.randrange(len(ids))] = -1
    return "GymSchemaError"


def _no_reward(rng, result):
    result.pop("reward_components", None)
    del result["reward"]
    return "RewardContractError"


def _bad_reward(rng, result):
    result.pop("reward_components", None)
    result["reward"] = rng.choice([None, "1.0", [], float("nan"), True])
    return "RewardContractError"


def _wrong_sum(rng, result):
    result["reward_components"] = {"correct": float(result["reward"]) + 0.5}
    return "RewardContractError"


def _no_tokens(rng, result):
    for item in turns_of(result):
        for name in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
            del item[name]
    result["response"]["incomplete_details"] = None
    return "NoGenerationError"


def _no_response(rng, result):
    result["response"] = None
    return "GymSchemaError"


def _reported(rng, result):
    result["_ng_failure_class"] = "sandbox"
    result["_ng_failure_terminal"] = True
    return "RolloutDataFailure"


FAULTS = (
    _break_prefix,
    _shorten_prompt,
    _lose_a_logprob,
    _null_logprob,
    _no_logprobs,
    _no_prompt,
    _negative_id,
    _no_reward,
    _bad_reward,
    _wrong_sum,
    _no_tokens,
    _no_response,
    _reported,
)


def broken_result(rng, fault=None):
    """An answer with one fault, and the name of the error it must end in."""
    while True:
        result = copy.deepcopy(any_result(rng))
        result["reward"] = float(result["reward"])
        error = (fault or rng.choice(FAULTS))(rng, result)
        if error is not None:
            return result, error


def body_of(rng, result):
    """The answer as bytes, spelled in one of the ways that servers spell JSON."""
    indent = rng.choice([None, None, 1])
    separators = rng.choice([(",", ":"), (", ", ": ")])
    return json.dumps(
        result, indent=indent, separators=separators, ensure_ascii=rng.random() < 0.5
    ).encode()

"""Generations over a switch of weights, and which weights their tokens came from."""

import itertools

import anyio

from gymrl.config import SamplingParams
from gymrl.generation.base import Generated
from gymrl.generation.fidelity import MAX_TOLERANCE, MEAN_TOLERANCE
from tests.integration.vllm.engines import PROMPT, until

LONG = SamplingParams(max_tokens=400, ignore_eos=True)


def check_spans(results: list[tuple[list[int], Generated]], models_by_version) -> set[str]:
    """Every token's log-probability is the one of the model that its span names."""
    seen, errors = set(), []
    for prompt, result in results:
        spans = result.weight_versions
        assert spans[0].start == 0
        assert spans[-1].end == len(result.token_ids)
        assert all(a.end == b.start for a, b in itertools.pairwise(spans))
        for version, start, end in spans:
            seen.add(version)
            own = models_by_version[version].errors(prompt, result, LONG)[start:end]
            errors += own
            others = [m for m in models_by_version.values() if m is not models_by_version[version]]
            for other in others:
                if end - start > 4:
                    assert max(other.errors(prompt, result, LONG)[start:end]) > 0.1
    assert sum(errors) / len(errors) < MEAN_TOLERANCE
    assert max(errors) < MAX_TOLERANCE
    return seen


async def under_load(generator, update, num_calls: int = 6, *, again: bool = False):
    """Run `update` while calls are in flight; what they sampled.

    They may be over before it, as the engine does not wait for us: with `again` they are followed
    by others, of which the last ones begin after the update.
    """
    results: list[tuple[list[int], Generated]] = []
    counts = [0] * num_calls
    is_over = anyio.Event()

    async def ask(index: int) -> None:
        prompt = [*PROMPT, *range(20, 20 + 3 * index)]

        def count(token_id: int, logprob: float) -> None:
            counts[index] += 1

        is_last = False
        while not is_last:
            is_last = is_over.is_set() or not again
            results.append((prompt, await generator.generate(prompt, LONG, on_token=count)))

    async def tokens(number: int) -> None:
        aim = [count + number if again else min(count + number, 400) for count in counts]
        await until(lambda: all(c >= a for c, a in zip(counts, aim, strict=True)))

    async with anyio.create_task_group() as group:
        for index in range(num_calls):
            group.start_soon(ask, index)
        await tokens(5)
        await update(tokens)
        is_over.set()
    return results


async def until_all_seen(attempt, models_by_version) -> list[tuple[list[int], Generated]]:
    """What the first `attempt` sampled whose calls have tokens of every version.

    An engine may be done with its calls before their first tokens are here.
    """
    for _ in range(20):
        results = await attempt()
        named = [result for result in results if result[1].weight_versions]
        if check_spans(named, models_by_version) == set(models_by_version):
            return results
    raise AssertionError("no calls were in flight while the weights changed")


async def until_cancelled(generator, source, restore, num_calls: int = 6):
    """What calls sampled while an update that waited for them was cancelled.

    They may be over before it waits: then it is undone by `restore`, and tried again.
    """
    cancelled = []

    async def update(tokens) -> None:
        with anyio.move_on_after(0.05) as scope:
            await generator.update_weights(source, "no", pause="wait")
        cancelled.append(scope.cancelled_caught)

    for _ in range(20):
        results = await under_load(generator, update, num_calls)
        if cancelled[-1]:
            return results
        await restore()
    raise AssertionError("no calls were in flight while an update waited for them")

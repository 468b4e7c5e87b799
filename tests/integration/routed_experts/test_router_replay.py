"""Router replay whole: a real mixture of experts, real HTTP, a tool in between, a batch at the end.

For every token of the batch the route is that which a teacher-forced forward pass of the same
weights gives at its place, read off the routers' logits.
"""

import pytest
import torch
import transformers

from gymrl.benchmark import load_benchmark
from gymrl.config import GenerationConfig, GymConfig, RolloutConfig, SamplingParams
from gymrl.generation.model_loading import without_progress_bars
from gymrl.records import RecordWriter, RunRecord, read_groups
from gymrl.rollout.engine import RolloutEngine
from gymrl.rollout.sync import collect
from gymrl.tensors import to_batch
from gymrl.testing import build_tiny_model

CALL = (
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}\n</tool_call>'
    "<|im_end|>"
)
TOP_K = 2
TASKS = load_benchmark("tool_arithmetic", num_tasks=2, seed=0)
ROWS = list(TASKS.rows)

# The first test also teaches the model its tool call.
pytestmark = pytest.mark.timeout(180)

torch.set_num_threads(1)


def load(directory):
    with without_progress_bars():
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def config_of(model: str, **settings) -> RolloutConfig:
    gym = settings.pop("gym", {})
    return RolloutConfig(
        generation=GenerationConfig(
            model=model, return_routed_experts=True, max_batch_size=4, num_threads=1
        ),
        gym=GymConfig(servers=TASKS.servers, tokenizer=model, **gym),
        seed=3,
        **{"sampling": SamplingParams(max_tokens=60), **settings},
    )


async def roll_out(config: RolloutConfig):
    async with RolloutEngine(config) as engine:
        return await engine.run(ROWS, num_generations=2)


def teach(directory, prompts: list[list[int]], answer: list[int]) -> None:
    """Have the model answer the prompts so, nearly always; weights are saved in place."""
    model = load(directory)
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    for _ in range(200):
        loss = torch.zeros(())
        for prompt in prompts:
            ids = torch.tensor([[*prompt, *answer]])
            logits = model(ids, logits_to_keep=len(answer) + 1).logits[0, :-1]
            loss = loss + torch.nn.functional.cross_entropy(logits, torch.tensor(answer))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 2e-3:
            break
    with without_progress_bars():
        model.save_pretrained(directory)


@pytest.fixture(scope="module")
def caller(tmp_path_factory) -> str:
    """A mixture of experts that begins with a tool call."""
    directory = build_tiny_model(tmp_path_factory.mktemp("moe"), architecture="qwen3_moe")
    groups = collect(
        config_of(str(directory), in_process=True, sampling=SamplingParams(max_tokens=1)), ROWS
    )
    first = [group.trajectories[0] for group in groups]
    prompts = [t.token_ids[: t.turns[0].generation_start].tolist() for t in first]
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    teach(directory, prompts, tokenizer.encode(CALL))
    return str(directory)


def expected_routes(model, token_ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        outputs = model(token_ids.unsqueeze(0), output_router_logits=True)
    return torch.stack([logits.topk(TOP_K).indices for logits in outputs.router_logits], dim=1)


def assert_batch_replays(directory: str, groups) -> None:
    batch, model = to_batch(groups, pad_token_id=0), load(directory).eval()
    assert batch.routed_experts.dtype == torch.int8
    assert batch.routed_experts.shape == (*batch.token_ids.shape, 2, TOP_K)
    for row, length in enumerate(batch.lengths.tolist()):
        routes, token_ids = batch.routed_experts[row], batch.token_ids[row, :length]
        expected = expected_routes(model, token_ids)
        assert routes[: length - 1].tolist() == expected[:-1].tolist()
        assert (routes[length - 1 :] == -1).all()
        log = batch.final_batch["message_log"][row]
        assert torch.cat([m["routed_experts"] for m in log]).tolist() == routes[:length].tolist()
    assert batch.missing_routes.tolist() == [0] * len(batch)


@pytest.mark.parametrize("token_source", ["messages", "ledger"])
async def test_every_route_of_the_batch_is_that_of_a_teacher_forced_pass(
    caller, tmp_path, token_source
):
    config = config_of(
        caller,
        in_process=True,
        gym={"require_routed_experts": True, "token_source": token_source},
    )

    groups = await roll_out(config)

    samples = [sample for group in groups for sample in group.trajectories]
    assert len(samples) == 4
    assert all(len(sample.turns) > 1 for sample in samples)
    assert all(b'"function_call_output"' in sample.result for sample in samples)
    assert_batch_replays(caller, groups)
    for group in groups:
        assert group.metrics["r3/routed_experts_fallback_token_routes"] == 0
        assert group.metrics["r3/routed_experts_actual_token_routes"] == sum(
            sample.num_tokens - 1 for sample in group.trajectories
        )
    path = tmp_path / "rollouts.jsonl"
    with RecordWriter(path, RunRecord()) as writer:
        for group in groups:
            writer.write(group)
    assert_batch_replays(caller, list(read_groups(path)))


async def test_routes_come_whole_out_of_worker_processes(caller):
    config = config_of(caller, gym={"require_routed_experts": True, "routed_experts_dtype": "int8"})

    groups = await roll_out(config)

    assert all(len(s.turns) > 1 for group in groups for s in group.trajectories)
    assert_batch_replays(caller, groups)

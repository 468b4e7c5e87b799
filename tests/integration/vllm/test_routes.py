"""Routes of a vLLM engine: on a GPU those of transformers, on a CPU a refusal that says why."""

import pytest
import torch
import transformers

from gymrl.config import SamplingParams
from gymrl.errors import ConfigError
from gymrl.generation.vllm import VllmGenerator
from gymrl.generation.vllm_process import is_cpu_build
from gymrl.testing import build_tiny_model
from tests.integration.vllm.engines import PROMPT, engine_config


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> str:
    return str(build_tiny_model(tmp_path_factory.mktemp("moe"), architecture="qwen3_moe"))


if is_cpu_build():

    def test_an_engine_on_a_cpu_refuses_to_return_routes_and_names_the_backend_that_does(
        mixture, monkeypatch
    ):
        # Loading sets it for good; later engines of this process must not see it.
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")

        with pytest.raises(ConfigError) as caught:
            VllmGenerator.load(engine_config(mixture, return_routed_experts=True))

        assert "Model Runner V2 requires Triton" in str(caught.value)
        assert "backend='transformers' returns routes on a CPU" in str(caught.value)

else:

    async def test_routes_of_an_engine_are_those_of_a_plain_forward_pass(mixture):
        generator, _ = VllmGenerator.load(engine_config(mixture, return_routed_experts=True))
        try:
            answer = await generator.generate(PROMPT * 20, SamplingParams(max_tokens=12, seed=1))
        finally:
            await generator.close()

        model = transformers.AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
        with torch.inference_mode():
            ids = torch.tensor([[*PROMPT * 20, *answer.token_ids]])
            layers = model(ids, output_router_logits=True).router_logits
        expected = torch.stack([logits.topk(2).indices for logits in layers], dim=1)
        routes = torch.tensor(answer.routed_experts)
        # Engines order a token's experts as they like.
        assert routes[:-1].sort().values.tolist() == expected[:-1].sort().values.tolist()
        assert (routes[-1] == -1).all()

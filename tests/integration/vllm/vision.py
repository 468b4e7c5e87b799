"""What transformers says of a vision-language model."""

import io
from typing import Any

import torch
import transformers
from PIL import Image

from gymrl.testing import build_image

SMALL = (56, 84, 1)
TALL = (56, 112, 2)
"""Width, height and seed of two images: 6 and 8 tokens."""


class VisionReference:
    """A vision-language model in transformers, and what it says about given tokens."""

    def __init__(self, directory) -> None:
        self.processor = transformers.AutoProcessor.from_pretrained(directory)
        self.load(directory)

    def load(self, directory) -> None:
        model = transformers.AutoModelForImageTextToText.from_pretrained(directory)
        self.model = model.float().eval()

    def prompt_ids(self, messages: list[dict[str, Any]], images) -> list[int]:
        text = self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        inputs = self.processor(text=[text], images=pictures(images) or None)
        return inputs["input_ids"][0]

    def logprobs(self, prompt_ids, token_ids, images) -> list[float]:
        pixels = {}
        if images:
            pixels = self.processor.image_processor(images=pictures(images), return_tensors="pt")
        ids = torch.tensor([*prompt_ids, *token_ids])
        return self.all_logprobs(ids, pixels)[-len(token_ids) :].tolist()

    @torch.inference_mode()
    def all_logprobs(self, ids: torch.Tensor, pixels: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of every token but the first."""
        is_image = (ids == self.model.config.image_token_id).int()
        shown = {**pixels, "mm_token_type_ids": is_image[None]} if pixels else {}
        logits = self.model(input_ids=ids[None], **shown).logits[0, :-1]
        return torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]

    def errors(self, answer: dict[str, Any], images) -> list[float]:
        """Of the log-probabilities of an answer's last item."""
        item = answer["output"][-1]
        expected = self.logprobs(item["prompt_token_ids"], item["generation_token_ids"], images)
        recorded = item["generation_log_probs"]
        return [abs(a - b) for a, b in zip(recorded, expected, strict=True)]


def pictures(images):
    return [Image.open(io.BytesIO(build_image(*image))) for image in images]

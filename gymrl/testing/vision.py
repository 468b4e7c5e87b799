"""A tiny real vision-language model, built offline in a second or two, and images to show it.

It is a PaddleOCR-VL: a SigLIP tower over images of any size, a projector that merges 2 x 2 patches,
and a text model with multimodal rotary positions, as Qwen2.5-VL has them. An image of 56 x 84
pixels is 2 x 3 = 6 tokens of a prompt, between ``<|vision_start|>`` and ``<|vision_end|>``, and the
processor gives ``pixel_values`` and ``image_grid_thw``, the names that Qwen's has too. It was chosen
because its processor needs Pillow alone: that of Qwen2.5-VL can't be loaded without torchvision.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken

from gymrl.extras import optional_imports
from gymrl.generation.chat import ChatFormat
from gymrl.generation.images import ImageFormat
from gymrl.generation.model_loading import without_progress_bars
from gymrl.testing.models import build_tiny_tokenizer, tiny_shape, with_template

with optional_imports():
    import torch
    import transformers
    from PIL import Image
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
        PaddleOCRVLImageProcessorPil,
    )

IMAGE_TOKEN = "<|image_pad|>"
VISION_START_TOKEN = "<|vision_start|>"
VISION_END_TOKEN = "<|vision_end|>"

PIXELS_PER_TOKEN = 28
"""Width and height of what one token of an image shows."""

VISION_TEMPLATE = """\
{%- macro shown(content) %}
{%- if content is string %}{{- content }}
{%- else %}
{%- for part in content %}
{%- if part.type in ('image', 'image_url', 'input_image') %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.text %}{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- shown(messages[0].content) + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nCall one with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + shown(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}
{{- '<think>' + message.reasoning_content + '</think>' }}
{%- endif %}
{{- shown(message.content) }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + shown(message.content) + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + shown(message.content) + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""ChatML with hermes tool calls, whose messages may hold images in any place."""


def build_tiny_vision_tokenizer(template: str = VISION_TEMPLATE) -> Any:
    """The tokenizer of :func:`build_tiny_vision_model`, with the markers of images."""
    backend = build_tiny_tokenizer(template).backend_tokenizer
    named = {
        "image_token": IMAGE_TOKEN,
        "vision_start_token": VISION_START_TOKEN,
        "vision_end_token": VISION_END_TOKEN,
    }
    backend.add_special_tokens([AddedToken(token, special=True) for token in named.values()])
    return with_template(backend, template, extra_special_tokens=named)


def build_tiny_vision_processor(template: str = VISION_TEMPLATE) -> Any:
    """The processor of :func:`build_tiny_vision_model`, with a tokenizer of its own."""
    return transformers.PaddleOCRVLProcessor(
        image_processor=PaddleOCRVLImageProcessorPil(
            min_pixels=PIXELS_PER_TOKEN**2, max_pixels=64 * PIXELS_PER_TOKEN**2
        ),
        tokenizer=build_tiny_vision_tokenizer(template),
        chat_template=template,
    )


def build_tiny_image_format() -> ImageFormat:
    """How prompts of :func:`build_tiny_vision_model` hold images; no model is made."""
    tokenizer = build_tiny_vision_tokenizer()
    chat = ChatFormat(tokenizer)
    return ImageFormat(build_tiny_vision_processor(), chat, tokenizer.image_token_id)


def build_tiny_vision_model(
    directory: str | Path,
    *,
    seed: int = 0,
    max_model_len: int = 2048,
    template: str = VISION_TEMPLATE,
) -> Path:
    """Write a tiny random vision-language model with its processor, as ``save_pretrained`` does.

    ``transformers.AutoProcessor`` and ``AutoModelForImageTextToText`` load it, and so does vLLM; in
    float32 the two give the same log-probabilities to within 1e-4.

    Args:
        directory: Made if missing.
        seed: Of the weights; torch's global generator is left as it was.
        max_model_len: Context in tokens.
        template: The chat template.

    Returns:
        The directory.
    """
    target = Path(directory)
    processor = build_tiny_vision_processor(template)
    tokenizer = processor.tokenizer
    with torch.random.fork_rng(devices=[]), without_progress_bars():
        torch.manual_seed(seed)
        config = _config(tokenizer, max_model_len)
        model = transformers.PaddleOCRVLForConditionalGeneration(config).float()
        _spread_weights(model)
        _never_say(
            model,
            [
                tokenizer.image_token_id,
                tokenizer.vision_start_token_id,
                tokenizer.vision_end_token_id,
            ],
        )
        model.save_pretrained(target)
    processor.save_pretrained(target)
    return target


def _config(tokenizer: Any, max_model_len: int) -> transformers.PaddleOCRVLConfig:
    text = tiny_shape(tokenizer, max_model_len) | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [4, 6, 6],
        },
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 112,
        "patch_size": PIXELS_PER_TOKEN // 2,
    }
    return transformers.PaddleOCRVLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.image_token_id,
        video_token_id=len(tokenizer),  # it has none: no token of the vocabulary
        vision_start_token_id=tokenizer.vision_start_token_id,
        vision_end_token_id=tokenizer.vision_end_token_id,
        tie_word_embeddings=False,
    )


def _spread_weights(model: Any) -> None:
    """Make what an image shows matter to the next token."""
    for parameter in model.model.visual.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    # transformers and vLLM interpolate learned positions by different rules where an image has
    # another size than the model was made for. Rotary ones remain, and are the same in both.
    embeddings = model.model.visual.vision_model.embeddings
    torch.nn.init.zeros_(embeddings.position_embedding.weight)


@torch.no_grad()
def _never_say(model: Any, token_ids: list[int]) -> None:
    """Make the model all but certain not to sample these tokens, as trained models are.

    One number of every hidden state is made a positive constant that no layer writes to; what
    these tokens' logits read is that number alone, times a large negative weight.
    """
    text, projector = model.model.language_model, model.model.projector
    text.embed_tokens.weight[:, 0] = 1.0
    projector.linear_2.weight[0] = 0.0
    projector.linear_2.bias[0] = 1.0
    for layer in text.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    model.lm_head.weight[token_ids] = 0.0
    model.lm_head.weight[token_ids, 0] = -100.0


def build_image(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG of random pixels, the same for the same arguments."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def build_image_uri(width: int, height: int, seed: int = 0) -> str:
    """The same PNG as a ``data:`` URI, the way messages carry images."""
    return "data:image/png;base64," + base64.b64encode(build_image(width, height, seed)).decode()

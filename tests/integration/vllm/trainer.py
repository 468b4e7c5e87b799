"""A trainer in a process of its own, which sends weights to an engine.

    python -m tests.integration.vllm.trainer MODEL [NUM_TENSORS]

Writes what ``update_weights`` takes as one line of JSON, then sends. With a number it ends, without
a word, after so many tensors.
"""

import os
import sys

import msgspec
import safetensors.torch
import torch

from gymrl.generation.weight_transfer import WeightSender


class Dying(dict[str, torch.Tensor]):
    """Weights whose owner is killed while they are sent."""

    def __init__(self, state: dict[str, torch.Tensor], num_tensors: int) -> None:
        super().__init__(state)
        self.num_tensors = num_tensors

    def values(self):
        for number, tensor in enumerate(super().values()):
            if number == self.num_tensors:
                os._exit(1)
            yield tensor


def main() -> None:
    state = safetensors.torch.load_file(f"{sys.argv[1]}/model.safetensors")
    sender = WeightSender(timeout_s=30)
    sys.stdout.buffer.write(msgspec.json.encode(sender.weights(state)) + b"\n")
    sys.stdout.buffer.flush()
    sender.send(Dying(state, int(sys.argv[2])) if len(sys.argv) > 2 else state)


if __name__ == "__main__":
    main()

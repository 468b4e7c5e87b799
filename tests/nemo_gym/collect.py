"""Run by the peer's interpreter: NeMo Gym's own collector, against the registry at a port."""

import asyncio
import json
import sys

from nemo_gym.rollout_collection import RolloutCollectionHelper
from nemo_gym.server_utils import BaseServerConfig


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")


async def main(port, rows):
    helper = RolloutCollectionHelper()
    rows = helper.preprocess_examples(rows, num_repeats=2)
    registry = BaseServerConfig(host="127.0.0.1", port=port)
    for future in helper.run_examples(rows, head_server_config=registry):
        row, result = await future
        say("RESULT", json.dumps([row["task_source"], row["_ng_rollout_index"], result["reward"]]))
    say("RAY", "ray" in sys.modules)


with open(sys.argv[2], encoding="utf-8") as file:
    asyncio.run(main(int(sys.argv[1]), json.load(file)))

"""The envelope of routes is the one that NeMo Gym itself writes and reads."""

import json
import subprocess

import numpy as np
import pytest

from gymrl.routed_experts import RouteFormatError, decode_routes, encode_routes

pytestmark = pytest.mark.nemo_gym

SCRIPT = """
import json, sys
from nemo_gym.token_id_capture.staging import routes

def told(text):
    try:
        return routes.decode_routed_experts(text).values
    except ValueError:
        return None

asked = json.load(sys.stdin)
json.dump({
    "written": [routes.encode_routed_experts(v, dtype=d) for v, d in asked["values"]],
    "read": [told(text) for text in asked["texts"]],
}, sys.stdout)
"""

VALUES = [
    ([[[0, 1], [2, 3]], [[-1, -1], [127, 5]]], "int8"),
    ([[[300]], [[-1]], [[32767]]], "int16"),
    ([[[70000, 1, 2]]], "int32"),
]
BROKEN = [
    "nrlre2:int8:1x1x1:AA==",
    "nrlre1:uint8:1x1x1:AA==",
    "nrlre1:int8:2x1x1:AA==",
    "nrlre1:int8:1x1:AA==",
    "nrlre1:int8:1x0x1:AA==",
    "nrlre1:int8:1x1x1:A!==",
]


def test_both_sides_write_the_same_text_and_refuse_the_same(gym_python):
    ours = [encode_routes(np.array(values, dtype=dtype)) for values, dtype in VALUES]
    asked = {"values": VALUES, "texts": [*ours, *BROKEN]}

    done = subprocess.run(
        [gym_python, "-c", SCRIPT],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )

    told = json.loads(done.stdout)
    assert told["written"] == ours
    assert told["read"] == [values for values, _ in VALUES] + [None] * len(BROKEN)
    for text in BROKEN:
        with pytest.raises(RouteFormatError):
            decode_routes(text)

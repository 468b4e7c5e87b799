import json

import pytest

from gymrl.types import Row


@pytest.fixture
def make_row():
    def make(index=0, route="fake_agent", **fields):
        body = {"responses_create_params": {"input": "hi"}, "_rowidx": index, **fields}
        return Row(
            index=index,
            task_index=index,
            rollout_index=0,
            route=route,
            rollout_id=f"r{index}",
            body=json.dumps(body).encode(),
        )

    return make

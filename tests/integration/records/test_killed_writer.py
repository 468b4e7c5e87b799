import os
import signal
import subprocess
import sys
import time

from gymrl.records import read_records


def test_a_killed_writer_leaves_a_file_that_reads(tmp_path):
    path = tmp_path / "r.jsonl"
    script = f"""
import sys
sys.path[:0] = {[os.getcwd()]!r}
import numpy as np
from gymrl.records import RecordWriter, RunRecord
from gymrl.types import Reward, RolloutGroup, Row, Trajectory, Turn
row = Row(index=0, task_index=0, rollout_index=0, route="m", rollout_id="r", body=b"{{}}")
sample = Trajectory(agent="m", token_ids=np.arange(5000, dtype=np.int32),
    logprobs=np.full(5000, -0.123456, dtype=np.float32),
    turns=(Turn(start=0, generation_start=1, end=5000),), reward=Reward(1.0))
group = RolloutGroup(index=0, task_index=0, rows=(row,), samples=(sample,))
with RecordWriter({str(path)!r}, RunRecord()) as writer:
    while True:
        writer.write(group)
"""
    writer = subprocess.Popen([sys.executable, "-c", script])
    try:
        deadline = time.monotonic() + 30
        while not path.exists() or path.stat().st_size < 1_000_000:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    records = list(read_records(path))
    assert len(records) >= 5
    assert all(len(record.trajectory.token_ids) == 5000 for record in records)

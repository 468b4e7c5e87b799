import json
from pathlib import Path


def prepare():
    path = Path(__file__).with_name("rows.jsonl")
    prompt = [{"role": "user", "content": "Say something."}]
    row = {"task_id": "r1", "responses_create_params": {"input": prompt}}
    path.write_text(json.dumps(row) + "\n")
    return path

"""Images of rollouts on disk: once each, beside the lines that refer to them."""

from __future__ import annotations

import hashlib
import json
import logging

import numpy as np

from gymrl.media import lift_images, restore_images, to_data_url
from gymrl.records import MediaFolder, RecordWriter, RunRecord, read_groups
from gymrl.types import ImageRef, Reward, RolloutGroup, Row, Trajectory, Turn

CAT, DOG = b"\x89PNG cat" * 50, b"\x89PNG dog" * 50


def ref(data: bytes) -> ImageRef:
    return ImageRef(hashlib.sha256(data).hexdigest(), "image/png", 3, 2)


def row(index: int) -> Row:
    content = [{"type": "input_image", "image_url": to_data_url(CAT, "image/png")}]
    params = {"input": [{"role": "user", "content": content}]}
    body, media = lift_images(json.dumps({"responses_create_params": params}).encode())
    return Row(
        index=index,
        task_index=0,
        rollout_index=index,
        route="eye",
        rollout_id=f"r{index}",
        body=body,
        media=media,
    )


def trajectory() -> Trajectory:
    answer = {
        "response": {"output": [to_data_url(CAT, "image/png"), to_data_url(DOG, "image/png")]}
    }
    result, media = lift_images(json.dumps(answer).encode())
    return Trajectory(
        agent="eye",
        token_ids=np.arange(4, dtype=np.int32),
        logprobs=np.zeros(4, np.float32),
        turns=(
            Turn(start=0, generation_start=1, end=2),
            Turn(start=2, generation_start=3, end=4),
        ),
        reward=Reward(1.0),
        result=result,
        images=((ref(CAT),), (ref(DOG), ref(CAT))),
        media=media,
    )


def write(path, *, count: int = 4) -> RolloutGroup:
    rows = tuple(row(index) for index in range(count))
    group = RolloutGroup(
        index=0, task_index=0, rows=rows, samples=tuple(trajectory() for _ in rows)
    )
    with RecordWriter(path, RunRecord()) as writer:
        writer.write(group)
    return group


def test_a_group_comes_back_with_its_images_and_each_is_on_disk_once(tmp_path):
    path = tmp_path / "run.jsonl"
    group = write(path)
    files = sorted((tmp_path / "run.jsonl.media").iterdir())
    assert [file.name for file in files] == sorted([ref(CAT).digest, ref(DOG).digest])
    assert b"base64,i" not in path.read_bytes()
    (read,) = read_groups(path)
    for before, after in zip(group.samples, read.samples, strict=True):
        assert after.images == before.images
        assert after.media == before.media
        assert json.loads(restore_images(after.result, after.media)) == json.loads(
            restore_images(before.result, before.media)
        )
    assert read.rows[0].media == group.rows[0].media
    assert json.loads(restore_images(read.rows[0].body, read.rows[0].media)) == json.loads(
        restore_images(group.rows[0].body, group.rows[0].media)
    )
    shared = {id(sample.media[ref(CAT).digest]) for sample in read.samples}
    assert len(shared) == 1


def test_a_file_without_its_images_is_read_and_they_are_missed_once(tmp_path, caplog):
    path = tmp_path / "run.jsonl"
    write(path)
    moved = tmp_path / "moved.jsonl"
    path.rename(moved)
    with caplog.at_level(logging.WARNING):
        (read,) = read_groups(moved)
    assert read.samples[0].images == ((ref(CAT),), (ref(DOG), ref(CAT)))
    assert read.samples[0].media == {}
    assert len([r for r in caplog.records if "is missing" in r.message]) == 1


def test_a_digest_of_a_file_does_not_lead_out_of_the_folder(tmp_path):
    folder = MediaFolder(tmp_path / "run.jsonl")
    folder.write({ref(CAT).digest: CAT})
    (tmp_path / "secret").write_bytes(b"s")
    assert folder.read(["../secret", str(tmp_path / "secret"), ref(CAT).digest]) == {
        ref(CAT).digest: CAT
    }


def test_a_run_of_text_makes_no_folder(tmp_path):
    path = tmp_path / "run.jsonl"
    with RecordWriter(path, RunRecord()):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["run.jsonl"]


def test_removing_the_images_leaves_what_somebody_else_put_there(tmp_path):
    write(tmp_path / "run.jsonl")
    folder = MediaFolder(tmp_path / "run.jsonl")
    (folder.path / "notes.txt").write_text("mine")
    folder.remove()
    assert [file.name for file in folder.path.iterdir()] == ["notes.txt"]
    (folder.path / "notes.txt").unlink()
    folder.write({ref(CAT).digest: CAT})
    folder.remove()
    assert not folder.path.exists()
    folder.remove()

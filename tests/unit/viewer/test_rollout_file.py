"""A file that is read while it is written, cut, replaced and taken away."""

import anyio
import pytest

from gymrl.errors import ConfigError, FileChangedError
from gymrl.viewer.rollout_file import RolloutFile
from tests.rollout_files import failure, trajectory, write_rollouts

POLL_S = 0.01


@pytest.fixture
def path(tmp_path):
    return write_rollouts(tmp_path / "rollouts.jsonl", [trajectory(1.0)], [trajectory(0.0)])


async def until(condition):
    with anyio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - what is waited for is on the disk
            await anyio.sleep(POLL_S)


async def read_whole(file):
    await until(lambda: file.progress.state == "following")


async def test_all_of_a_file_is_read_in_blocks_of_any_size(path):
    async with RolloutFile(path, block_bytes=100, poll_s=POLL_S) as file:
        await read_whole(file)
        assert file.index.num_rows == 2
        assert file.progress.indexed == file.progress.size == path.stat().st_size


async def test_rows_that_are_appended_appear(path):
    async with RolloutFile(path, poll_s=POLL_S) as file:
        await read_whole(file)
        write_rollouts(path, [failure()], append=True, first=2)
        await until(lambda: file.index.num_rows == 3)
        assert file.epoch == 1
        assert (await file.snapshot()).num_rows == 3


async def test_a_half_last_line_counts_when_it_is_whole(path):
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    async with RolloutFile(path, poll_s=POLL_S) as file:
        await read_whole(file)
        assert (file.index.num_rows, file.index.num_broken) == (1, 0)
        assert file.progress.unfinished > 0
        with path.open("ab") as end:
            end.write(data[-20:])
        await until(lambda: file.index.num_rows == 2)
        assert file.progress.unfinished == 0


async def test_a_half_line_that_its_writer_cuts_off_and_writes_anew_is_read_anew(path):
    whole = path.read_bytes()
    with path.open("ab") as end:
        end.write(whole.splitlines()[1][:300].replace(b"math_agent", b"other_agen"))
    async with RolloutFile(path, poll_s=POLL_S) as file:
        await read_whole(file)
        write_rollouts(path, [trajectory(0.5)], append=True, first=2)
        await until(lambda: file.index.num_rows == 3)
        assert (file.index.num_broken, file.epoch) == (0, 1)


async def test_a_file_that_is_replaced_is_read_anew(path, tmp_path):
    other = write_rollouts(tmp_path / "other.jsonl", [failure()])
    async with RolloutFile(path, poll_s=POLL_S) as file:
        await read_whole(file)
        other.replace(path)
        await until(lambda: file.epoch == 2 and file.index.num_rows == 1)
        assert file.index.names.failures.texts == ["infra: RolloutTimeout"]


async def test_a_file_that_is_cut_is_read_anew(path):
    async with RolloutFile(path, poll_s=POLL_S) as file:
        await read_whole(file)
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
        await until(lambda: file.epoch == 2 and file.index.num_rows == 1)


async def test_a_file_that_is_rewritten_in_place_to_a_longer_one_is_read_anew(path, tmp_path):
    other = write_rollouts(tmp_path / "other.jsonl", *[[failure()]] * 5).read_bytes()
    async with RolloutFile(path, poll_s=POLL_S) as file:
        await read_whole(file)
        with path.open("r+b") as same:
            same.write(other)
        assert path.stat().st_size >= file.progress.size
        await until(lambda: file.epoch == 2 and file.index.num_rows == 5)


async def test_a_file_that_is_gone_keeps_its_list_and_is_read_when_it_is_back(path):
    data = path.read_bytes()
    async with RolloutFile(path, poll_s=POLL_S) as file:
        await read_whole(file)
        path.unlink()
        await until(lambda: file.progress.state == "gone")
        assert file.index.num_rows == 2
        with pytest.raises(FileChangedError, match="No such file"):
            await file.read(0, 10)
        path.write_bytes(data)
        await until(lambda: file.epoch == 2 and file.index.num_rows == 2)


async def test_bytes_of_a_file_that_was_replaced_are_not_taken_for_the_old_ones(path, tmp_path):
    size = path.stat().st_size
    async with RolloutFile(path, poll_s=60) as file:
        await read_whole(file)
        assert len(await file.read(0, size)) == size
        write_rollouts(tmp_path / "other.jsonl", *[[failure()]] * 5).replace(path)
        with pytest.raises(FileChangedError, match="has changed"):
            await file.read(0, size)
        with pytest.raises(FileChangedError, match="has changed"):
            await file.read(0, 10, epoch=7)


async def test_a_file_that_is_empty_yet_is_followed(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.touch()
    async with RolloutFile(path, poll_s=POLL_S) as file:
        await read_whole(file)
        assert file.index.num_rows == 0
        write_rollouts(path, [trajectory()], append=True)
        await until(lambda: file.index.num_rows == 1)


async def test_broken_lines_are_counted_and_do_not_end_the_reading(path):
    path.write_bytes(path.read_bytes() + b"{oh no\n")
    write_rollouts(path, [trajectory()], append=True, first=2)
    async with RolloutFile(path, poll_s=POLL_S) as file:
        await read_whole(file)
        assert (file.index.num_rows, file.index.num_broken) == (3, 1)
        assert file.index.broken[0].line == 4


@pytest.mark.parametrize("content", [b"hello\n", b'{"a": 1}\n', b"\x00\x01\x02\n"])
async def test_what_is_no_file_of_rollouts_is_refused(tmp_path, content):
    path = tmp_path / "other.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="the first line is no record of rollouts"):
        async with RolloutFile(path):
            pass


async def test_a_file_of_a_newer_format_is_refused(path):
    path.write_bytes(path.read_bytes().replace(b'"schema":1', b'"schema":99'))
    with pytest.raises(ConfigError, match="schema 99; this gymrl reads up to 1: upgrade it"):
        async with RolloutFile(path):
            pass


async def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        async with RolloutFile(tmp_path / "nowhere.jsonl"):
            pass
    with pytest.raises(ConfigError, match="Is a directory"):
        async with RolloutFile(tmp_path):
            pass

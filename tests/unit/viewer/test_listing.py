"""Pages of lists, and searches that go on where they stopped."""

import json

import numpy as np
import pytest

from gymrl.viewer import listing
from gymrl.viewer.index import RolloutIndex, take_snapshot
from gymrl.viewer.listing import list_groups, list_rows
from gymrl.viewer.query import parse_query
from gymrl.viewer.scan import LineScanner
from tests.rollout_files import answer, failure, trajectory, write_rollouts


class Pages:
    """Lists of one file, with the bytes that they read."""

    def __init__(self, path):
        self.data = path.read_bytes()
        self.index = RolloutIndex()
        self.index.extend(LineScanner().scan(self.data))
        self.snapshot = take_snapshot(*self.index.freeze())
        self.reads = 0

    def read(self, offset, size):
        self.reads += 1
        return self.data[offset : offset + size]

    def groups(self, **parameters):
        return list_groups(self.snapshot, self.index.names, parse_query(parameters), self.read)

    def rows(self, **parameters):
        return list_rows(self.snapshot, self.index.names, parse_query(parameters), self.read)

    def found(self, text, **parameters):
        return [row.line for row in self.rows(q=text, **parameters).rows]


@pytest.fixture
def pages(tmp_path):
    def make(*outcomes, **options):
        return Pages(write_rollouts(tmp_path / "rollouts.jsonl", *outcomes, **options))

    return make


def test_a_page_of_groups_has_their_numbers_rows_and_prompts(pages):
    page = pages([trajectory(1.0), failure()], [trajectory(0.5)]).groups()

    assert (page.total, page.matching_rows) == (2, 3)
    first, second = page.groups
    assert (first.expected, first.count, first.failures, first.mean) == (2, 2, 1, 1.0)
    assert [(row.reward, row.failure) for row in first.rows] == [
        (1.0, ""),
        (None, "infra: RolloutTimeout"),
    ]
    assert (first.preview, second.preview) == ("task 0", "task 1")


def test_a_page_is_cut_out_of_the_order(pages):
    lists = pages(*[[trajectory(reward)] for reward in (0.1, 0.5, 0.3, 0.9)])
    page = lists.groups(sort="-mean", offset="1", limit="2")

    assert page.total == 4
    assert [group.mean for group in page.groups] == [0.5, 0.3]
    assert lists.reads == 2


def test_the_prompt_is_the_last_user_message(pages):
    prompts = {
        0: [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "one\n  two"}]},
            {"role": "assistant", "content": "never mind"},
        ]
    }
    assert pages([trajectory()], prompts=prompts).groups().groups[0].preview == "one two"


def test_without_a_user_message_the_prompt_is_what_the_model_was_given(pages):
    assert pages([trajectory()], prompts={0: []}).groups().groups[0].preview == "What is 2 + 2?"


def test_rows_that_a_later_attempt_replaces_are_not_listed(pages, tmp_path):
    path = write_rollouts(tmp_path / "twice.jsonl", [failure()])
    path.write_bytes(path.read_bytes() + path.read_bytes().splitlines(keepends=True)[1])
    lists = Pages(path)

    assert [row.line for row in lists.rows().rows] == [3]
    assert [row.superseded for row in lists.groups().groups[0].rows] == [True, False]


def test_a_search_finds_texts_wherever_they_are_in_a_row(pages):
    lists = pages(
        [trajectory(result=answer({"type": "function_call", "name": "look_up"}))],
        [trajectory()],
        [failure(message="the server went away")],
        prompts={1: "Where is the Sea?"},
    )
    assert lists.found("look_up") == [2]
    assert lists.found("the sea") == [3]
    assert lists.found("WENT AWAY") == [4]
    assert lists.found("nothing of that") == []
    assert "the Sea?" in lists.rows(q="the sea").rows[0].snippet


@pytest.mark.parametrize(
    "text", ['she said "no"', "line\nbreak", "back\\slash", "Où est 漢字 \N{GRINNING FACE}", "a/b"]
)
def test_a_search_finds_what_json_spells_in_another_way(pages, text):
    result = json.dumps({"said": text}).encode()
    lists = pages([trajectory(result=result)], [trajectory()], [trajectory()], prompts={1: text})
    assert lists.found(text) == [2, 3]


def test_numbers_are_not_found_among_token_ids_and_logprobs(pages):
    lists = pages([trajectory(logprobs=(-0.4711,))], [trajectory()], prompts={1: "Is it 4711?"})
    assert lists.found("4711") == [3]


def test_letters_are_not_found_among_routes(pages):
    routes = np.zeros((3, 1, 1), dtype=np.int8)  # nrlre1:int8:3x1x1:AAAA
    lists = pages(
        [trajectory(prompt=1, routed_experts=routes)], [trajectory()], prompts={1: "aaaa"}
    )
    assert lists.found("AAAA") == [3]


def test_a_search_goes_over_the_rows_that_pass_the_filters_in_their_order(pages):
    lists = pages([trajectory(0.0), trajectory(1.0), failure()])
    assert lists.found("task", failure="none", sort="-reward") == [3, 2]


def test_a_search_stops_at_a_full_page_and_goes_on_from_its_cursor(pages):
    lists = pages(*[[trajectory()]] * 5)
    first = lists.rows(q="task", limit="2")
    second = lists.rows(q="task", limit="2", cursor=str(first.cursor))
    third = lists.rows(q="task", limit="2", cursor=str(second.cursor))

    assert [[row.line for row in page.rows] for page in (first, second, third)] == [
        [2, 3],
        [4, 5],
        [6],
    ]
    assert (first.cursor, second.cursor, third.cursor) == (2, 4, None)


def test_a_search_reads_no_more_than_its_bound_at_a_time(pages):
    wide = "x" * 3_000_000
    lists = pages(*[[trajectory(result=json.dumps({"x": wide}).encode())]] * 30)
    page = lists.rows(q="task")

    assert page.scanned <= listing.SEARCH_BYTES + 3_100_000
    assert page.cursor is not None
    assert len(page.rows) == page.cursor == lists.reads

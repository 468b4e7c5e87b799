"""The task of asking a tool and saying what it answered."""

import msgspec

from gymrl.gym.embedded.base import Peers
from gymrl.gym.embedded.reply import Reply
from gymrl.recipes.look_up import LookUpServer, look_up_rows

TABLE = {"red": "cat", "blue": "dog"}


def reply(*calls, said=""):
    items = [
        {"type": "function_call", "name": "lookup", "arguments": arguments} for arguments in calls
    ]
    message = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": said}],
    }
    return Reply(items=(*items, message))


async def verdict(*calls, said=""):
    server = LookUpServer("look_up", {}, Peers())
    return await server.verify({"word": "red", "table": TABLE}, reply(*calls, said=said), None)


async def test_looking_up_and_saying_it_earns_the_whole_reward():
    judged = await verdict('{"name":" red "}', said="cat")
    assert judged.reward == 1.0
    assert judged.components == {"looked_up": 0.2, "answered": 0.8}


async def test_looking_up_the_right_word_alone_earns_its_part():
    assert (await verdict('{"name":"red"}', said="dog")).reward == 0.2


async def test_a_guess_earns_the_answers_part_alone():
    assert (await verdict('{"name":"blue"}', said="cat dog")).reward == 0.8


async def test_a_call_whose_arguments_are_no_object_is_no_look_up():
    judged = await verdict('["red"]', '{"name":3}', said="sun")
    assert judged.reward == 0.0
    assert judged.extras["asked"] == [None, None]


async def test_the_tool_reads_the_sessions_own_table():
    server = LookUpServer("look_up", {}, Peers())
    state = await server.seed_session({"word": "red", "table": TABLE})
    assert await server.lookup(state, " blue ") == "dog"


def test_tasks_of_two_seeds_have_different_tables():
    first, again, other = look_up_rows(4, seed=1), look_up_rows(4, seed=1), look_up_rows(4, seed=2)
    assert first == again
    assert [row["table"] for row in first] != [row["table"] for row in other]
    assert all(set(row["table"]) > {row["word"]} for row in first)
    assert msgspec.json.decode(msgspec.json.encode(first)) == first

"""Which images belong to which turn."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.config import MediaConfig
from gymrl.errors import MediaError
from gymrl.gym.episode import EpisodeOptions, read_episode
from gymrl.gym.images import ImageBins, bin_images, image_sources, read_items

CONFIG = MediaConfig()
CAT, DOG, OWL = (f"data:image/png;base64,{text}" for text in ("Y2F0", "ZG9n", "b3ds"))


def user(*urls: str, role: str = "user") -> dict:
    parts = [{"type": "input_image", "image_url": url} for url in urls]
    return {"role": role, "content": [{"type": "input_text", "text": "look"}, *parts]}


def tool(output) -> dict:
    return {"type": "function_call_output", "call_id": "c", "output": output}


def turn(prompt: list[int], sampled: list[int], **fields) -> dict:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "yes"}],
        "prompt_token_ids": prompt,
        "generation_token_ids": sampled,
        "generation_log_probs": [-0.5] * len(sampled),
        **fields,
    }


def sources(item: dict, config: MediaConfig = CONFIG) -> list[str]:
    (read,) = read_items(json.dumps([item]).encode())
    return image_sources(read, config)


def bins(output: list[dict], prompt: list[dict] = (), **options) -> list[tuple[str, ...]]:
    """The bins that reading an answer's tokens fills, held against those of the items alone."""
    filled = ImageBins(CONFIG)
    items = read_items(json.dumps(list(prompt)).encode())
    for item in items:
        filled.add(item)
    answer = {
        "response": {"output": output, "incomplete_details": options.pop("incomplete", None)},
        "reward": 1.0,
    }
    trajectory = read_episode(
        json.dumps(answer).encode(),
        agent="agent",
        options=EpisodeOptions(**options),
        images=filled,
    )
    assert len(filled.turns) == len(trajectory.turns)
    return filled.turns


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "image_url": CAT},
        {"type": "input_image", "image_url": {"url": CAT}},
        {"type": "image_url", "image_url": {"url": CAT, "detail": "low"}},
        {"type": "image", "image": CAT},
        {"type": "image", "url": CAT},
        {"type": "input_image", "image": None, "image_url": CAT},
    ],
)
def test_a_part_names_its_image_in_every_form_that_is_in_use(part):
    assert sources({"role": "user", "content": [part]}) == [CAT]
    assert sources(tool([part])) == [CAT]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_image", "image_url": '{"x":1}'},
        {"type": "input_image", "image_url": "/etc/passwd"},
        {"type": "input_image", "image_url": ""},
        {"type": "input_image", "image_url": None},
        {"type": "input_image", "image_url": "data:text/plain,hi"},
        {"type": "input_image", "image_url": {"url": 7}},
        {"type": "input_image", "image_url": 7},
        {"type": "input_image", "file_id": "f1"},
        {"type": "input_image"},
    ],
)
@pytest.mark.parametrize("place", ["content", "output"])
def test_a_part_that_says_it_is_an_image_and_names_none_is_a_data_failure(part, place):
    """NVIDIA-NeMo/RL#3414: content parts went to the loader unguarded."""
    item = tool([part]) if place == "output" else {"role": "user", "content": [part]}
    with pytest.raises(MediaError, match="a part of type 'input_image'"):
        sources(item)


@pytest.mark.parametrize(
    "output",
    [
        '{"x": 0.65, "y": 0.83}',
        "",
        "/etc/passwd",
        "file:///etc/passwd",
        "http://127.0.0.1:1/x.png",
        "https://example.com is where it is",
        "data:text/plain,hi",
        None,
        {"image_url": CAT},
        7,
        [],
        ["text"],
        [{"type": "input_text", "text": CAT}],
    ],
)
def test_a_tools_answer_that_is_no_image_counts_none(output):
    """NVIDIA-NeMo/RL#3414: JSON of a click was opened as a file."""
    assert sources(tool(output)) == []


def test_a_tools_answer_may_be_an_image_alone_or_in_parts():
    assert sources(tool(CAT)) == [CAT]
    assert sources(tool(CAT.replace("data:image", "DATA:IMAGE"))) == ["DATA:IMAGE" + CAT[10:]]
    parts = [{"type": "input_image", "image_url": CAT}, {"type": "input_image", "image_url": DOG}]
    assert sources(tool(parts)) == [CAT, DOG]
    hosts = MediaConfig(schemes=("data", "http"), allowed_hosts=("cats.org",))
    assert sources(tool("http://cats.org/1.png"), hosts) == ["http://cats.org/1.png"]
    assert sources(tool("http://dogs.org/1.png"), hosts) == []


def test_an_assistants_message_has_no_image():
    assert sources(user(CAT, role="assistant")) == []
    assert sources(user(CAT, role="system")) == [CAT]
    assert sources(user(CAT, role="developer")) == [CAT]


def test_the_prompts_images_are_the_first_turns():
    """NVIDIA-NeMo/RL#3414: prompt images are in the request's input, never in the output."""
    assert bins([turn([1], [2])], [user(CAT, DOG)]) == [(CAT, DOG)]


def test_observations_before_the_first_turn_follow_the_prompts_images():
    output = [tool(DOG), turn([1], [2]), tool(OWL), turn([1, 2, 3], [4])]
    assert bins(output, [user(CAT)]) == [(CAT, DOG), (OWL,)]
    assert bins(output) == [(DOG,), (OWL,)]


def test_a_turn_without_images_keeps_its_place():
    output = [
        turn([1], [2]),
        tool("{}"),
        turn([1, 2, 3], [4]),
        user(OWL),
        turn([1, 2, 3, 4, 5], [6]),
    ]
    assert bins(output, [user(CAT)]) == [(CAT,), (), (OWL,)]


def test_images_after_the_last_turn_were_seen_by_nobody():
    assert bins([turn([1], [2]), tool(CAT)]) == [()]


def test_a_turn_need_not_be_an_assistants_message():
    call = turn([1], [2]) | {"type": "function_call", "name": "look", "arguments": "{}"}
    del call["role"], call["content"]
    thought = turn([1, 2, 3], [4]) | {"type": "reasoning", "summary": []}
    del thought["role"], thought["content"]
    assert bins([call, tool(CAT), thought]) == [(), (CAT,)]


def test_the_images_of_a_call_without_an_answer_roll_on_to_the_next_turn():
    output = [tool(CAT), turn([1], []), tool(DOG), turn([1, 5], [2])]
    assert bins(output) == [(CAT, DOG)]


def test_a_placeholder_has_the_images_of_its_prompt():
    output = [turn([7, 7, 1], []), tool(DOG)]
    incomplete = {"reason": "max_output_tokens"}
    assert bins(output, [user(CAT)], incomplete=incomplete) == [(CAT,)]
    assert bins([], [user(CAT)], incomplete=incomplete) == [()]


def test_turns_that_a_broken_prefix_left_out_take_their_images_along():
    output = [turn([1], [2]), tool(CAT), turn([9], [4]), tool(DOG), turn([9, 4], [5])]
    assert bins(output, on_broken_prefix="truncate") == [()]


def test_a_bad_part_names_the_turn_whose_prompt_it_was_for():
    output = [turn([1], [2]), user("/tmp/x.png"), turn([1, 2, 3], [4])]
    with pytest.raises(
        MediaError, match=r"turn 1: a part of type 'input_image' has '/tmp"
    ) as caught:
        bins(output)
    assert (caught.value.turn, caught.value.agent) == (1, "agent")


def test_a_request_whose_input_is_a_text_shows_no_image():
    assert read_items(json.dumps(CAT).encode()) == []
    assert read_items(b"null") == []


def naive(output: list[dict], prompt: list[dict]) -> list[tuple[str, ...]]:
    """Word by word: an image belongs to the first turn that comes after it."""
    walk = [(item, False) for item in prompt]
    walk += [(item, bool(item.get("generation_token_ids"))) for item in output]
    turns = [place for place, (_, is_turn) in enumerate(walk) if is_turn]
    owners: list[list[str]] = [[] for _ in turns]
    for place, (item, is_turn) in enumerate(walk):
        later = [number for number, at in enumerate(turns) if at > place]
        if is_turn or not later or item.get("role") == "assistant":
            continue
        if item.get("type") == "function_call_output":
            found = [item["output"]] if str(item["output"]).startswith("data:image/") else []
        else:
            found = [part["image_url"] for part in item["content"] if "image_url" in part]
        owners[later[0]] += found
    return [tuple(found) for found in owners]


urls = st.sampled_from([CAT, DOG, OWL])
shown = st.lists(urls, max_size=2).map(lambda found: user(*found))
observed = st.one_of(
    shown,
    urls.map(tool),
    st.sampled_from(["{}", "", "/tmp/x"]).map(tool),
    st.lists(urls, max_size=2).map(lambda found: user(*found, role="assistant")),
)
sampled = st.sampled_from([[3], [4, 5], []])


@settings(deadline=None, max_examples=60)
@given(st.lists(shown, max_size=2), st.lists(st.one_of(observed, sampled), max_size=9))
def test_images_are_binned_as_a_naive_reading_bins_them(prompt, steps):
    seen: list[int] = [1]
    output = []
    for step in steps:
        if isinstance(step, dict):
            output.append(step)
            continue
        output.append(turn(list(seen), step))
        seen += step
    expected = naive(output, prompt)
    items = [read_items(json.dumps(part).encode()) for part in (output, prompt)]
    assert bin_images(*items, CONFIG) == expected
    if expected:
        assert bins(output, prompt) == expected

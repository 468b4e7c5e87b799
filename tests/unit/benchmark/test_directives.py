import copy

import pytest

from gymrl.benchmark.directives import apply_directives
from gymrl.errors import ConfigError

BASE = {"responses_api_agents": {"simple": {"entrypoint": "app.py", "max_steps": 3}}}


def test_a_block_inherits_and_the_other_disappears():
    own = {"_inherit_from": "base", "responses_api_agents": {"simple": {"max_steps": 9}}}

    assert apply_directives({"base": BASE, "mine": own}) == {
        "mine": {"responses_api_agents": {"simple": {"entrypoint": "app.py", "max_steps": 9}}}
    }


def test_two_blocks_may_inherit_from_one():
    config = {"base": BASE, "a": {"_inherit_from": "base"}, "b": {"_inherit_from": "base"}}

    assert apply_directives(config) == {"a": BASE, "b": BASE}


def test_a_copy_leaves_the_other_block():
    assert apply_directives({"base": {"x": 1}, "mine": {"_copy": "base", "y": 2}}) == {
        "base": {"x": 1},
        "mine": {"x": 1, "y": 2},
    }


def test_inheritance_goes_through_several_blocks():
    config = {
        "a": {"x": 1, "y": 1},
        "b": {"_inherit_from": "a", "y": 2},
        "c": {"_inherit_from": "b", "z": 3},
    }

    assert apply_directives(config) == {"c": {"x": 1, "y": 2, "z": 3}}


def test_keys_are_deleted_from_what_is_inherited():
    config = {"a": {"x": 1, "y": 1, "z": 1}, "b": {"_inherit_from": "a", "_delete_key": "x, z"}}

    assert apply_directives(config) == {"b": {"y": 1}}


def test_a_deleted_key_of_the_block_itself_is_not_looked_at():
    config = {"b": {"_delete_key": "x", "x": {"_inherit_from": "nowhere"}, "y": 1}}

    assert apply_directives(config) == {"b": {"y": 1}}


def test_a_value_may_be_taken_from_a_path():
    config = {"a": {"b": {"c": [1, 2]}}, "x": "${copy:a.b.c}", "y": "${inherit_from:a.b}"}

    assert apply_directives(config) == {"a": {}, "x": [1, 2], "y": {"c": [1, 2]}}


def test_other_interpolations_stay_as_they_are():
    config = {"a": {"k": "${name}"}, "b": {"_copy": "a"}}

    assert apply_directives(config)["b"] == {"k": "${name}"}


def test_the_given_configuration_is_not_changed():
    config = {"base": copy.deepcopy(BASE), "mine": {"_inherit_from": "base", "l": [{"x": 1}]}}
    before = copy.deepcopy(config)

    apply_directives(config)

    assert config == before


def test_a_path_that_leads_nowhere_is_refused():
    with pytest.raises(ConfigError, match=r"mine: inherit_from names 'no\.such'"):
        apply_directives({"mine": {"_inherit_from": "no.such"}})


def test_blocks_that_inherit_from_each_other_are_refused():
    with pytest.raises(ConfigError, match="b -> a -> b"):
        apply_directives({"a": {"_inherit_from": "b"}, "b": {"_inherit_from": "a"}})


def test_a_key_to_delete_that_nobody_has_is_refused():
    with pytest.raises(ConfigError, match="a has no key 'x'"):
        apply_directives({"a": {"y": 1}, "b": {"_inherit_from": "a", "_delete_key": "x"}})


def test_what_is_unset_stays_unset():
    assert apply_directives({"a": "???", "b": {"_copy": "a", "x": 1}})["b"] == "???"

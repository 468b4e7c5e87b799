import inspect

import pytest

from gymrl import errors
from gymrl.errors import (
    ConfigError,
    ContextOverflowError,
    GymrlError,
    GymTransportError,
    NonContiguousTokensError,
    RolloutTimeout,
    UnsupportedOptionError,
)

ALL_ERRORS = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, GymrlError) and cls.__module__ == "gymrl.errors"
]


def test_an_error_carries_its_facts_beside_the_text():
    error = GymTransportError("503 from http://a", url="http://a", status=503, row=7)

    assert str(error) == "503 from http://a"
    assert (error.url, error.status, error.row) == ("http://a", 503, 7)
    assert error.turn is None
    assert error.kind == "infra"


def test_a_field_that_the_class_does_not_declare_is_a_programming_error():
    with pytest.raises(TypeError, match="declares no field 'colour'"):
        GymTransportError("x", colour="red")


def test_an_error_is_rebuilt_from_its_text_and_fields():
    error = NonContiguousTokensError("turn 2", turn=2, position=3, expected=[4], received=[9])

    again = NonContiguousTokensError.rebuild(error.message, error.fields)

    assert str(again) == "turn 2"
    assert (again.turn, again.position, again.expected, again.received) == (2, 3, [4], [9])


def test_a_field_of_a_newer_version_is_dropped_when_an_error_is_rebuilt():
    again = ConfigError.rebuild("x", {"setting": "a", "unheard_of": 1, "_private": 2})

    assert again.fields == {"setting": "a"}


@pytest.mark.parametrize("cls", ALL_ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_is_in_the_tree_that_the_module_draws(cls):
    assert cls.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("cls", ALL_ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_survives_being_rebuilt_without_fields(cls):
    assert str(cls.rebuild("what happened", {})) == "what happened"


@pytest.mark.parametrize(
    ("cls", "parent"),
    [
        (ConfigError, ValueError),
        (UnsupportedOptionError, AssertionError),
        (UnsupportedOptionError, ValueError),
        (RolloutTimeout, TimeoutError),
        (RolloutTimeout, RuntimeError),
        (ContextOverflowError, ValueError),
        (errors.RowTypeError, TypeError),
        (errors.RowIndexTypeError, TypeError),
        (errors.RowIndexValueError, ValueError),
        (errors.IncompleteStreamError, RuntimeError),
        (errors.EncodeError, TypeError),
    ],
)
def test_a_caller_who_catches_the_standard_type_catches_ours(cls, parent):
    with pytest.raises(parent):
        raise cls("x")

"""Describing and rebuilding errors never raises, and is bounded."""

from __future__ import annotations

import threading

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.actors.failures import MAX_TEXT, ErrorData, describe, describe_briefly, rebuild
from gymrl.errors import (
    FrameTooLargeError,
    GymTransportError,
    NonContiguousTokensError,
    RemoteError,
)


class Holder(Exception):
    def __init__(self, thing: object) -> None:
        super().__init__("holds something", thing)


class Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit(1)


def travelled(error: BaseException) -> Exception:
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(describe(error)), type=ErrorData)
    return rebuild(data, "actor")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        return caught


def test_known_errors_come_back_as_themselves_with_the_remote_traceback_as_cause():
    error = travelled(raised(KeyError("x")))
    assert type(error) is KeyError
    assert error.args == ("x",)
    assert isinstance(error.__cause__, RemoteError)
    assert "in raised" in error.__cause__.remote_traceback


def test_fields_of_our_errors_come_back():
    error = travelled(NonContiguousTokensError("no", row=3, expected=[1], received=[2]))
    assert type(error) is NonContiguousTokensError
    assert (error.row, error.expected, error.received, error.turn) == (3, [1], [2], None)
    late = FrameTooLargeError("big")
    late.size = 7
    assert travelled(late).size == 7


def test_unknown_errors_come_back_as_remote_errors():
    error = travelled(raised(Holder(threading.Lock())))
    assert type(error) is RemoteError
    assert error.remote_type == "Holder"
    assert "holds something" in error.remote_message
    assert error.actor == "actor"


def test_the_untellable_is_told():
    assert "__str__ raised SystemExit" in describe(raised(Mute())).message
    long = describe(ValueError("x" * 10_000_000))
    assert len(long.message) < MAX_TEXT + 100
    assert "characters left out" in long.message
    assert type(travelled(ValueError("x" * 10_000_000))) is ValueError
    assert "\\ud800" in str(travelled(ValueError("\ud800")))


def test_base_exceptions_never_come_back_as_themselves():
    for error in (SystemExit(1), KeyboardInterrupt(), GeneratorExit(), BaseException("b")):
        assert type(travelled(error)) is RemoteError
    for error in (StopIteration(1), StopAsyncIteration()):
        assert type(travelled(error)) is RemoteError


def test_chains_are_kept_bounded_and_loops_end():
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    error = travelled(first)
    assert type(error) is ValueError
    assert type(error.__cause__.__cause__) is KeyError
    chain = ValueError("0")
    for number in range(1000):
        above = ValueError(str(number))
        above.__cause__ = chain
        chain = above
    assert len(msgspec.msgpack.encode(describe(chain))) < 1_000_000


def test_groups_keep_their_members_and_wide_ones_are_bounded():
    group = travelled(ExceptionGroup("many", [KeyError("a"), Holder(1)]))
    assert type(group) is ExceptionGroup
    assert group.message == "many"
    assert [type(member) for member in group.exceptions] == [KeyError, RemoteError]
    wide = ExceptionGroup("w", [ExceptionGroup("x", [ValueError("y")] * 40) for _ in range(40)])
    wider = ExceptionGroup("w", [ExceptionGroup("x", [wide] * 40) for _ in range(40)])
    assert len(msgspec.msgpack.encode(describe(wider))) < 10_000_000


def test_a_brief_description_is_small():
    data = describe_briefly(ValueError("x" * 100_000), "cut short: " + "y" * 10_000)
    assert len(msgspec.msgpack.encode(data)) < 3000


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([ValueError, KeyError, OSError, RuntimeError, UnicodeError]),
    st.lists(st.text() | st.integers() | st.none() | st.binary(), max_size=3),
)
def test_any_arguments_of_builtins_travel(kind, args):
    error = travelled(kind(*args))
    assert isinstance(error, (kind, RemoteError))


def test_attributes_that_raise_below_exception_do_not_escape():
    # An `args` that raises KeyboardInterrupt once ended the worker that described it.
    class Hostile(Exception):
        @property
        def args(self):
            raise KeyboardInterrupt

        @property
        def __cause__(self):
            raise SystemExit(3)

        def __str__(self):
            raise GeneratorExit

    data = describe(Hostile())
    assert data.type.endswith("Hostile")
    assert "GeneratorExit" in data.message
    assert type(rebuild(data)) is RemoteError


def test_an_error_number_beyond_64_bits_travels_as_text():
    data = describe(OSError(-(2**63) - 1, "", ""))
    crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(data), type=type(data))
    assert crossed == data
    assert isinstance(rebuild(crossed), Exception)


def test_fields_that_no_class_declares_or_of_another_type_are_dropped_and_raise_nothing():
    sent = {"message": "x", "args": 5, "fields": 3, "kind": "data", "add_note": 1, "_x": 1}
    sound = {"url": "http://a", "retry_after_s": 2}
    data = ErrorData(
        type="GymTransportError",
        module="gymrl.errors",
        message="m",
        fields={**sent, **sound, "status": "soon", "body": ["a"]},
    )
    error = rebuild(data)
    assert type(error) is GymTransportError
    assert (error.message, error.kind, error.fields) == ("m", "infra", sound)
    assert error.status is None

"""What an actor class promises is read, and refused, when it is defined."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np  # noqa: TC002  # read at run time, off the annotations
import numpy.typing as npt  # noqa: TC002
import pytest

from gymrl.actors import Actor, spawn
from gymrl.actors.actor import contract_of
from gymrl.actors.codec import RoundTrip
from gymrl.errors import EncodeError


class Resource:
    """Something that lives in one process."""


class Inner(msgspec.Struct):
    lock: Resource


class Tree(msgspec.Struct):
    children: list[Tree] = []
    body: bytes = b""


class Good(Actor):
    async def setup(self, a: int, b: str = "b") -> None: ...
    async def call(self, n: int, *, key: str, extra: npt.NDArray[np.int32] | None = None) -> Tree:
        return Tree()

    async def stream(self, tree: Tree) -> AsyncIterator[list[float]]:
        yield []

    async def anything(self, value: Any):
        return value

    async def _private(self) -> None: ...
    def plain(self, f: Callable[[], int]) -> None: ...


def test_public_async_methods_are_the_contract():
    contract = contract_of(Good)
    assert {name: m.kind for name, m in contract.methods.items()} == {
        "call": "call",
        "stream": "stream",
        "anything": "call",
    }
    assert contract.methods["stream"].result == list[float]
    assert contract.methods["call"].bytes_in_result
    assert not contract.methods["call"].bytes_in_arguments
    assert contract.methods["stream"].bytes_in_arguments


def test_arguments_are_bound_by_place_and_name():
    call = contract_of(Good).methods["call"]
    bound = call.bind((1,), {"key": "k"}, RoundTrip())
    assert (bound.n, bound.key, bound.extra) == (1, "k", msgspec.UNSET)
    with pytest.raises(TypeError, match="misses argument 'key'"):
        call.bind((1,), {}, RoundTrip())
    with pytest.raises(TypeError, match="takes 1 positional"):
        call.bind((1, "k"), {}, RoundTrip())


def test_an_argument_deep_inside_is_named_by_its_path():
    stream = contract_of(Good).methods["stream"]
    with pytest.raises(EncodeError, match=r"children\[0\].body"):
        stream.bind(({"children": [{"body": 3}]},), {}, RoundTrip())


@pytest.mark.parametrize(
    ("annotation", "path"),
    [
        (Resource, r"Bad.method\(x\): type"),
        (list[Inner], r"Bad.method\(x\)\[\].lock"),
        (dict[str, tuple[int, Inner]], r"Bad.method\(x\){}\[1\].lock"),
        (Callable[[], int], "Callable"),
        (object, "object"),
        (complex, "complex"),
        (memoryview, "use bytes"),
        (msgspec.Raw, "use bytes"),
        (int | Resource, "Resource"),
    ],
    ids=str,
)
def test_a_type_that_cannot_travel_is_refused_when_the_class_is_defined(annotation, path):
    async def method(self, x): ...

    method.__annotations__ = {"x": annotation, "return": None}
    with pytest.raises(EncodeError, match=path):
        type("Bad", (Actor,), {"method": method})


def test_a_result_or_item_that_cannot_travel_is_refused_too():
    with pytest.raises(EncodeError, match=r"Bad.method -> "):

        class Bad(Actor):
            async def method(self) -> list[Inner]:
                return []

    with pytest.raises(EncodeError, match="AsyncIterator"):

        class Yields(Actor):
            async def method(self) -> int:
                yield 1


def test_variable_arguments_and_reserved_set_up_names_are_refused():
    with pytest.raises(EncodeError, match=r"\*rest"):

        class Variable(Actor):
            async def method(self, *rest: int) -> None: ...

    with pytest.raises(EncodeError, match="'options' has a meaning"):

        class Reserved(Actor):
            async def setup(self, options: int) -> None: ...


def test_an_annotation_that_does_not_exist_is_refused_at_spawn():
    class Later(Actor):
        async def method(self, x: NeverDefined) -> None: ...  # noqa: F821

    with pytest.raises(EncodeError, match=r"'NeverDefined'.*run time"):
        spawn(Later, in_process=True)


def test_subclasses_inherit_and_override():
    class Derived(Good):
        async def call(self, n: int) -> int:  # type: ignore[override]
            return n

        async def more(self) -> None: ...

    contract = contract_of(Derived)
    assert set(contract.methods) == {"call", "stream", "anything", "more"}
    assert contract.methods["call"].result is int

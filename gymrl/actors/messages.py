"""The whole protocol: every message that crosses a link, as a tagged struct.

A message is the *head* of a frame; what it carries (arguments, a result, an item, an error) is the
frame's payload, encoded by the annotation of the method it belongs to. Calls and streams are
numbered by the caller. Every call gets exactly one of `Result`, `Failed`, `Cancelled`; every stream
gets any number of `Item` and then exactly one of `End`, `Failed`, `Cancelled`.
"""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 1


class Hello(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """First message of each side. Its shape never changes, so that versions can be compared."""

    version: int
    pid: int


class Start(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """To the callee: import this class and set it up. Payload: set-up arguments.

    Attributes:
        module: The module to import.
        qualname: The class in it.
        file: Where the module's source is, when it may not be importable by name.
        is_script: The module is the driver's ``__main__``: load its definitions only.
        name: What the actor is called.
    """

    module: str
    qualname: str
    file: str | None
    is_script: bool
    name: str


class Ready(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """From the callee: set-up is done."""


class Refused(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """From the callee: import or set-up failed. Payload: the error."""


class Call(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """Run a method. Payload: arguments."""

    id: int
    method: str


class Open(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """Start a stream with a window. Payload: arguments."""

    id: int
    method: str
    window: int
    window_bytes: int


class Credit(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """The reader of a stream has read `items` more."""

    id: int
    items: int


class Cancel(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """End a call or stream; its terminal message is the acknowledgement."""

    id: int


class Result(msgspec.Struct, tag=9, array_like=True, frozen=True):
    """A call returned. Payload: its result."""

    id: int


class Item(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """One item of a stream. Payload: the item."""

    id: int


class End(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """A stream's generator returned."""

    id: int


class Failed(msgspec.Struct, tag=12, array_like=True, frozen=True):
    """A call or stream raised. Payload: the error."""

    id: int


class Cancelled(msgspec.Struct, tag=13, array_like=True, frozen=True):
    """A call or stream ended because it was cancelled."""

    id: int


class Close(msgspec.Struct, tag=14, array_like=True, frozen=True):
    """To the callee: end what runs, run ``close``, within `timeout_s`."""

    timeout_s: float


class Closed(msgspec.Struct, tag=15, array_like=True, frozen=True):
    """From the callee: ``close`` has run. Payload: its error, or nothing."""


class Ping(msgspec.Struct, tag=16, array_like=True, frozen=True):
    """Are you there?"""

    token: int


class Pong(msgspec.Struct, tag=17, array_like=True, frozen=True):
    """I am."""

    token: int


class Release(msgspec.Struct, tag=18, array_like=True, frozen=True):
    """Shared segments that the receiver no longer looks at."""

    segments: list[int]


class Forget(msgspec.Struct, tag=19, array_like=True, frozen=True):
    """Shared segments that their owner has given up."""

    segments: list[int]


Message = (
    Hello
    | Start
    | Ready
    | Refused
    | Call
    | Open
    | Credit
    | Cancel
    | Result
    | Item
    | End
    | Failed
    | Cancelled
    | Close
    | Closed
    | Ping
    | Pong
    | Release
    | Forget
)

"""How a worker is started, bounded and stopped."""

from __future__ import annotations

import msgspec

from gymrl.config import Config, require


class SpawnOptions(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one actor.

    Attributes:
        name: How logs and errors call it; None makes one from the class and a number.
        handshake_timeout_s: Deadline for the child to come up and say hello.
        start_timeout_s: Deadline for importing the class and running its set-up.
        close_timeout_s: Deadline for an orderly end; then the process group is killed.
        cancel_timeout_s: How long a cancelled call waits for its callee to end. After that the
            caller goes on and the callee is left behind, with a warning.
        stream_window: Items of a stream that may be under way unread.
        stream_window_bytes: Bytes of a stream that may be under way unread (one item always may).
        max_frame_bytes: Larger messages are refused on both sides.
        segment_bytes: Messages at least this large go through shared memory on one node.
        max_segment_bytes: Shared memory of one direction of a link; above it messages go inline.
        heartbeat_timeout_s: A worker process whose event loop shows nothing for so long, once its
            set-up is done, is killed, and what it had under way fails. One that computes, or waits
            for a processor or the disk, is given four times as long. Choose it longer than any
            call blocks the loop. None: a worker that is stopped or stuck is waited for.
        keepalive_s: On links to other nodes: how often the client shows that it is there.
        expiry_s: On links to other nodes: a peer that shows nothing for so long is gone.
        env: Environment variables to set in the child, beside the driver's own. They are kept out
            of its command line and of the text of these options.
        stderr_lines: Last output lines kept for the error of a child that dies.
        output_lines_per_s: More output lines than this are counted, not logged.
    """

    name: str | None = None
    handshake_timeout_s: float = 30.0
    start_timeout_s: float = 600.0
    close_timeout_s: float = 10.0
    cancel_timeout_s: float = 5.0
    stream_window: int = 64
    stream_window_bytes: int = 64 << 20
    max_frame_bytes: int = 2 << 30
    segment_bytes: int = 512 << 10
    max_segment_bytes: int = 1 << 30
    heartbeat_timeout_s: float | None = None
    keepalive_s: float = 5.0
    expiry_s: float = 20.0
    env: dict[str, str] = msgspec.field(default_factory=dict)
    stderr_lines: int = 40
    output_lines_per_s: int = 200

    def __post_init__(self) -> None:
        for setting in (
            "handshake_timeout_s",
            "start_timeout_s",
            "close_timeout_s",
            "cancel_timeout_s",
            "stream_window",
            "stream_window_bytes",
            "segment_bytes",
            "keepalive_s",
            "output_lines_per_s",
        ):
            value = getattr(self, setting)
            require(value > 0, setting, value, "must be positive")
        require(
            self.heartbeat_timeout_s is None or self.heartbeat_timeout_s > 0,
            "heartbeat_timeout_s",
            self.heartbeat_timeout_s,
            "must be positive, or left out",
        )
        require(
            self.expiry_s > self.keepalive_s,
            "expiry_s",
            self.expiry_s,
            f"must be longer than keepalive_s={self.keepalive_s}",
        )
        require(
            (64 << 10) <= self.max_frame_bytes <= (4 << 30),
            "max_frame_bytes",
            self.max_frame_bytes,
            "must be between 64 KiB and 4 GiB",
        )
        require(self.max_segment_bytes >= 0, "max_segment_bytes", self.max_segment_bytes, "0: off")
        require(self.stderr_lines >= 0, "stderr_lines", self.stderr_lines, "0 keeps none")

    def __repr__(self) -> str:
        """The settings, with the names of `env` alone: values of variables are often secrets."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown["env"] = sorted(self.env)
        return f"SpawnOptions({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

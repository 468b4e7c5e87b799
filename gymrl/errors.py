"""Every error that gymrl raises on purpose, as one tree.

::

    GymrlError
    ├── ConfigError (ValueError)             a setting is wrong: names the field, the value, the remedy
    │   └── RealServersError                 a benchmark needs NeMo Gym's own servers
    ├── OutputError (RuntimeError)           what a run gave can't be written: names the file and why
    ├── UnsupportedOptionError (ValueError, AssertionError)   an option that this road does not have
    ├── DeadlineExceeded (TimeoutError)      a wait ended: names what was waited for and the setting
    ├── RowError                             a row was refused before anything ran
    │   ├── RowTypeError (TypeError)
    │   └── RowValueError (ValueError)
    ├── RolloutStreamError (RuntimeError)    a stream of rows broke its contract
    │   ├── RowIndexTypeError (TypeError)
    │   ├── RowIndexValueError (ValueError)
    │   └── IncompleteStreamError            it ended before every row arrived
    ├── RolloutFailure (RuntimeError)        one attempt at a row ended; `kind` says whose fault
    │   ├── RolloutInfraFailure              infra: the prompt is fine, the fleet is not
    │   │   ├── GymTransportError            connection trouble, HTTP 5xx, 408, 429
    │   │   ├── MediaFetchError              an image could not be downloaded now
    │   │   ├── LedgerLostError              the server forgot what it served: evicted, or restarted
    │   │   ├── CohortIncomplete             an attempt that it was compared with has failed
    │   │   └── RolloutTimeout (TimeoutError)
    │   └── RolloutDataFailure               data: deterministic for this row
    │       ├── GymRequestError              HTTP 4xx: the server refused this row
    │       ├── GymSchemaError               the server's answer is not what the protocol says
    │       ├── LedgerMismatchError          what the server served is not what the agent's answer says
    │       ├── NonContiguousTokensError     a turn's prompt does not begin with what was sampled
    │       ├── MediaError (ValueError)      an image is refused or broken
    │       ├── BadLogprobsError             missing, short, null, NaN or infinite
    │       ├── RoutedExpertsError           routes are missing, malformed, or too few for the tokens
    │       ├── RewardContractError (ValueError)  no number, or not the sum of its components
    │       ├── RowRejected                  the caller's `accept` refused the sample
    │       └── NoGenerationError            no turn to train on
    ├── RolloutRedispatchExhausted (RuntimeError)   the infra budget of a row is spent
    ├── GenerationError (RuntimeError)
    │   ├── GenerationRequestError (ValueError)   the request can't be served as it stands
    │   ├── ContextOverflowError (ValueError)   the prompt does not fit; carries both numbers
    │   ├── PrefixError (ValueError)            the chat template rewrote history
    │   ├── GenerationTransportError            a server that generates could not be reached, or broke off
    │   ├── GeneratorDiedError                  the engine's process ended
    │   └── WeightUpdateError                   new weights were not taken; says which ones serve
    │       └── WeightsLostError                no restart helps: nothing holds the weights of now
    ├── RankFailedError (RuntimeError)       another rank of the job failed or is gone; says which and why
    ├── EnvironmentContractError (ValueError)   an environment's step is not what the protocol says
    ├── FileChangedError (RuntimeError)      a file is no longer the one that was read
    ├── ServerError (RuntimeError)           a server of ours: names the instance and the URL
    │   ├── ServerStartError
    │   └── ServerDiedError
    └── ActorError (RuntimeError)
        ├── ActorStartError                  import, handshake or set-up failed
        ├── ActorDiedError                   the process ended: exit code or signal, last lines
        ├── ActorClosedError                 a call on a handle that is closed
        ├── ActorStreamError                 a stream ended without its end marker
        ├── RemoteError                      an exception of the callee that is unknown here
        ├── PoisonError                      a payload that kills its worker fails alone
        ├── EncodeError (TypeError)          a value that cannot travel: names its path
        └── ProtocolError
            ├── FrameTooLargeError           names the size and the limit
            ├── TornFrameError               the link ended inside a frame
            ├── ProtocolVersionError
            └── AuthenticationError

An error carries its facts as fields beside the text, each of them plain data, so that it can cross
a process boundary as data and be rebuilt on the other side (:meth:`GymrlError.rebuild`).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

FailureKindName = Literal["infra", "data"]


class GymrlError(Exception):
    """Root of the tree: a text and named fields of plain data.

    Args:
        message: What happened, where, and what to do.
        **fields: Facts that the class declares as attributes. An undeclared name is a
            programming error (`TypeError`).
    """

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(message)
        for name, value in fields.items():
            if name.startswith("_") or not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} declares no field {name!r}")
            setattr(self, name, value)
        self.fields: dict[str, Any] = fields

    @property
    def message(self) -> str:
        """The text alone."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.fields))

    @classmethod
    def rebuild(cls, message: str, fields: dict[str, Any]) -> Self:
        """Make the error again from what crossed the wire; fields unknown here are dropped."""
        declared = cls.declared()
        return cls(message, **{k: v for k, v in fields.items() if k in declared})

    @classmethod
    def declared(cls) -> frozenset[str]:
        """The names of the fields that the class declares."""
        return frozenset(
            name
            for base in cls.__mro__
            if issubclass(base, GymrlError)
            for name, kind in base.__annotations__.items()
            if not name.startswith("_") and "ClassVar" not in str(kind)
        )


def _rebuild(cls: type[GymrlError], message: str, fields: dict[str, Any]) -> GymrlError:
    return cls.rebuild(message, fields)


class ConfigError(GymrlError, ValueError):
    """A setting is wrong. The text names the field, the value and the remedy."""

    setting: str | None = None


class RealServersError(ConfigError):
    """NeMo Gym's own servers are needed that can't be started here, and nobody has started them."""


class OutputError(GymrlError, RuntimeError):
    """What a run gave can't be written: no space, no permission, a file that is gone."""

    path: str | None = None


class UnsupportedOptionError(GymrlError, ValueError, AssertionError):
    """An option that this road does not have (greedy decoding through Gym, say)."""

    setting: str | None = None


class DeadlineExceeded(GymrlError, TimeoutError):
    """A wait ended without its result."""

    what: str | None = None
    seconds: float | None = None
    setting: str | None = None


class RowError(GymrlError):
    """A row was refused before anything ran."""

    row: int | None = None


class RowTypeError(RowError, TypeError):
    """A field of the row has the wrong type, or is missing."""


class RowValueError(RowError, ValueError):
    """A field of the row has a value that cannot be served."""


class RolloutStreamError(GymrlError, RuntimeError):
    """A stream of rows broke its contract, or its instance failed."""

    instance: str | None = None
    row: int | None = None


class RowIndexTypeError(RolloutStreamError, TypeError):
    """A streamed row index is not an integer."""


class RowIndexValueError(RolloutStreamError, ValueError):
    """A streamed row is out of range, came twice, or does not fit its group."""


class IncompleteStreamError(RolloutStreamError):
    """The stream ended before every expected row arrived."""

    missing: list[int] | None = None


class RolloutFailure(GymrlError, RuntimeError):
    """One attempt at a row ended. `kind` says whose fault and so what happens next."""

    kind: ClassVar[FailureKindName] = "data"

    row: int | None = None
    turn: int | None = None
    agent: str | None = None
    instance: str | None = None
    url: str | None = None
    status: int | None = None
    attempts: int | None = None
    body: str | None = None


class RolloutInfraFailure(RolloutFailure):
    """The prompt is fine, the fleet is not: dispatch again."""

    kind: ClassVar[FailureKindName] = "infra"


class GymTransportError(RolloutInfraFailure):
    """Connection trouble, or an HTTP status that says "not now" (5xx, 408, 429).

    `was_sent` is False where no connection was made, so that the server has seen nothing.
    """

    retry_after_s: float | None = None
    was_sent: bool | None = None


class RolloutTimeout(RolloutInfraFailure, TimeoutError):
    """The row did not end within its deadline."""

    seconds: float | None = None
    setting: str | None = None


class MediaFetchError(RolloutInfraFailure):
    """An image could not be downloaded now: connection trouble, a deadline, HTTP 5xx, 408, 429."""

    source: str | None = None


class LedgerLostError(RolloutInfraFailure):
    """The server no longer knows what it served to a rollout; `reason` says why."""

    rollout_id: str | None = None
    reason: str | None = None


class RolloutDataFailure(RolloutFailure):
    """Deterministic for this row: a second try would most likely end the same way."""

    kind: ClassVar[FailureKindName] = "data"


class GymRequestError(RolloutDataFailure):
    """The server refused this row (HTTP 4xx other than 408 and 429)."""


class GymSchemaError(RolloutDataFailure):
    """The server's answer is not what the protocol says; `path` names the place."""

    path: str | None = None


class LedgerMismatchError(RolloutDataFailure):
    """What the server says it served, and what the agent's answer carries, are not the same.

    `field` is what differs: ``turns``, ``prompt_token_ids``, ``generation_token_ids`` or
    ``generation_log_probs``; `position` counts in that field.
    """

    field: str | None = None
    position: int | None = None
    expected: list[float] | None = None
    received: list[float] | None = None


class NonContiguousTokensError(RolloutDataFailure):
    """A turn's prompt does not begin with the tokens seen so far."""

    position: int | None = None
    expected: list[int] | None = None
    received: list[int] | None = None


class MediaError(RolloutDataFailure, ValueError):
    """An image is refused or broken; `source` is the beginning of what named it.

    `expected` and `received` are counts, where images and their places among the tokens disagree.
    """

    source: str | None = None
    expected: int | None = None
    received: int | None = None


class BadLogprobsError(RolloutDataFailure):
    """Log-probabilities are missing, too few, null, NaN or infinite."""

    position: int | None = None


class RoutedExpertsError(RolloutDataFailure):
    """Routes of a mixture-of-experts model are missing, malformed, or do not fit the tokens.

    `expected` and `received` are numbers of tokens, where those differ.
    """

    expected: int | None = None
    received: int | None = None


class RewardContractError(RolloutDataFailure, ValueError):
    """The verifier's reward is no finite number, or is not the sum of its components."""

    reward: float | None = None
    components: dict[str, float] | None = None


class CohortIncomplete(RolloutInfraFailure):
    """An attempt has its reward, but one that it was compared with by its verifier has failed."""


class RowRejected(RolloutDataFailure):
    """The caller's `accept` refused the sample; it is not attempted again."""


class NoGenerationError(RolloutDataFailure):
    """The result holds no turn to train on."""

    prompt_length: int | None = None


class RolloutRedispatchExhausted(GymrlError, RuntimeError):
    """A row spent its budget of dispatches; the run cannot go on."""

    row: int | None = None
    attempts: int | None = None


class GenerationError(GymrlError, RuntimeError):
    """The generator could not serve a request."""


class GenerationRequestError(GenerationError, ValueError):
    """The request can't be served as it stands; `param` names the field that is wrong."""

    param: str | None = None
    position: int | None = None


class ContextOverflowError(GenerationError, ValueError):
    """The prompt leaves no room in the context; both numbers are fields."""

    prompt_tokens: int | None = None
    max_model_len: int | None = None


class PrefixError(GenerationError, ValueError):
    """The chat template rewrote history, so the sampled tokens are no prefix of the prompt."""

    position: int | None = None
    expected: list[int] | None = None
    received: list[int] | None = None


class GenerationTransportError(GenerationError):
    """A server that generates could not be reached, or broke off before its answer was whole."""

    url: str | None = None
    status: int | None = None


class GeneratorDiedError(GenerationError):
    """The engine's process ended; the generator must be started again."""

    model: str | None = None


class WeightUpdateError(GenerationError):
    """New weights were not taken.

    `serving` is the version that goes on serving. None: what the engine holds is unknown, and it
    refuses every call until it is started again. `num_engines` is set where a trainer's sender was
    made for other engines than take the weights: make another one, for so many.
    """

    version: str | None = None
    serving: str | None = None
    source: str | None = None
    num_engines: int | None = None


class WeightsLostError(WeightUpdateError):
    """A generator that is started again can't be given the weights of now: nobody holds them."""


class RankFailedError(GymrlError, RuntimeError):
    """Another rank of a torchrun job failed, or is gone; its own error is the ``__cause__``."""

    rank: int | None = None
    where: str | None = None


class EnvironmentContractError(GymrlError, ValueError):
    """What an environment's step returned is not what the protocol says; the run ends."""

    task_name: str | None = None


class FileChangedError(GymrlError, RuntimeError):
    """A file that was read before is now another, shorter, or gone."""


class ServerError(GymrlError, RuntimeError):
    """A server that gymrl started or was told of is not well."""

    instance: str | None = None
    url: str | None = None


class ServerStartError(ServerError):
    """A server did not become ready within its deadline."""


class ServerDiedError(ServerError):
    """A server that was ready is gone."""

    exit_code: int | None = None


class ActorError(GymrlError, RuntimeError):
    """Root of everything that concerns worker processes and their messages."""

    actor: str | None = None


class ActorStartError(ActorError):
    """The child could not be imported, did not shake hands in time, or its set-up raised."""

    remote_type: str | None = None
    remote_traceback: str | None = None
    stderr: str | None = None


class ActorDiedError(ActorError):
    """The child process ended while something was expected of it."""

    exit_code: int | None = None
    signal: int | None = None
    stderr: str | None = None


class ActorClosedError(ActorError):
    """A call on a handle that is closed."""


class ActorStreamError(ActorError):
    """A stream ended without its end marker."""


class RemoteError(ActorError):
    """An exception of the callee whose type is unknown here, with all that is known of it."""

    remote_type: str | None = None
    remote_module: str | None = None
    remote_message: str | None = None
    remote_traceback: str | None = None


class PoisonError(ActorError):
    """A payload that killed its worker too often; it fails alone."""

    deaths: int | None = None


class EncodeError(ActorError, TypeError):
    """A value that cannot travel; `path` leads to it."""

    path: str | None = None


class ProtocolError(ActorError):
    """The bytes of the link are not what the protocol says."""


class FrameTooLargeError(ProtocolError):
    """A frame is over the limit."""

    size: int | None = None
    limit: int | None = None


class TornFrameError(ProtocolError):
    """The link ended inside a frame."""

    received: int | None = None
    expected: int | None = None


class ProtocolVersionError(ProtocolError):
    """The two ends speak different versions."""

    local: int | None = None
    remote: int | None = None


class AuthenticationError(ProtocolError):
    """The peer could not prove that it knows the shared secret."""

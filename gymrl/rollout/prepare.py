"""Dataset rows (dictionaries) to frozen rows: stamped, checked and encoded once, before any request.

Images are taken out of the bodies and held once for all rows that show them
(:attr:`gymrl.types.Row.media`). The caller's dictionaries are never changed. What is stamped on the
copy that travels:

=============================================  ====================================================
``responses_create_params.temperature/top_p``  of the sampling profile
``responses_create_params.max_output_tokens``  the smaller of the row's own and the profile's
``responses_create_params.metadata``           ``extra_body``: JSON text with the row's ``seed``
``_rowidx``                                    place in the batch
``_ng_task_index``, ``_ng_rollout_index``      identity group and place in it, where the row has none
``_ng_rollout_id``                             unique to this attempt
``_ng_group_id``, ``_ng_group_attempt``        of rows that share a prompt, for verifiers that compare
                                               them: unique to these rows, and 0
=============================================  ====================================================
"""

from __future__ import annotations

import hashlib
import secrets
import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from gymrl.errors import ConfigError, RowTypeError, RowValueError, UnsupportedOptionError
from gymrl.gym.materialized import flat_row
from gymrl.gym.shards import row_route
from gymrl.media import ImageLifter
from gymrl.rollout.encode import encode_body
from gymrl.types import Row

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from gymrl.config import SamplingParams

# Options that a Responses request has no field for: the server would refuse or ignore them.
_UNSUPPORTED_PARAMS = ("top_k", "stop", "stop_token_ids", "greedy", "max_rollout_turns")


class GroupSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Three sizes of contiguous runs of rows that are often, but not always, one number.

    Attributes:
        group: Rows that are gathered and yielded together.
        routing: Rows that must stay on one instance; None: as `group`.
        identity: Rows that share one prompt; None: as `group`.
        returns_entire_batch: `group` is the whole batch, whatever prompts and agents it mixes.
    """

    group: int
    routing: int | None = None
    identity: int | None = None
    returns_entire_batch: bool = False

    @property
    def routing_size(self) -> int:
        """`routing`, or its default."""
        return self.group if self.routing is None else self.routing

    @property
    def identity_size(self) -> int:
        """`identity`, or its default."""
        return self.group if self.identity is None else self.identity

    def check(self, num_rows: int) -> None:
        """Refuse sizes that do not fit a batch of `num_rows`.

        Raises:
            RowTypeError: A size is not an integer.
            RowValueError: The batch is empty, a size is not positive or does not divide it, or
                `returns_entire_batch` comes with a group of another size.
        """
        if num_rows == 0:
            raise RowValueError("the batch is empty: give at least one row")
        sizes = {
            "num_generations": self.group,
            "routing_group_size": self.routing_size,
            "identity_num_generations": self.identity_size,
        }
        for name, size in sizes.items():
            check_count(name, size)
            if num_rows % size:
                raise RowValueError(f"{name}={size} does not divide the batch of {num_rows} rows")
        if self.returns_entire_batch and self.group != num_rows:
            raise RowValueError(
                f"returns_entire_batch needs num_generations to be the size of the batch: "
                f"{self.group} is not {num_rows}"
            )


def check_count(name: str, value: object) -> None:
    """Refuse what is no positive integer.

    Raises:
        RowTypeError: Not an integer (a bool is none).
        RowValueError: Not positive.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise RowTypeError(f"{name}={value!r}: an integer is needed")
    if value <= 0:
        raise RowValueError(f"{name}={value}: must be positive")


def refuse_unsupported(
    sampling: SamplingParams,
    *,
    greedy: bool = False,
    max_rollout_turns: int | None = None,
    is_training: bool = True,
) -> None:
    """Refuse sampling options that do not reach the model through Gym.

    Args:
        sampling: The profile.
        greedy: Asked for beside it.
        max_rollout_turns: Asked for beside it.
        is_training: False lets a temperature of 0 pass: nobody trains on the log-probabilities.

    Raises:
        UnsupportedOptionError: Names the option, its value and what to do.
    """
    never = "leave it out"
    asked = (
        ("greedy", greedy, greedy, "set a temperature above 0"),
        (
            "temperature",
            is_training and sampling.temperature == 0,
            sampling.temperature,
            "greedy decoding has no log-probabilities of its own; set one above 0",
        ),
        ("top_k", sampling.top_k is not None, sampling.top_k, never),
        ("stop", bool(sampling.stop), sampling.stop, "leave it out; the agent ends its turns"),
        ("stop_token_ids", bool(sampling.stop_token_ids), sampling.stop_token_ids, never),
        ("ignore_eos", sampling.ignore_eos, sampling.ignore_eos, never),
        (
            "max_rollout_turns",
            max_rollout_turns is not None,
            max_rollout_turns,
            "set the limit in the agent's configuration",
        ),
    )
    for setting, is_asked, value, remedy in asked:
        if is_asked:
            raise UnsupportedOptionError(
                f"{setting}={value!r} is not supported in rollouts through Gym: {remedy}",
                setting=setting,
            )


_ATTEMPT_FIELDS = frozenset({"_ng_rollout_index", "_ng_rollout_id"})


def repeat_rows(rows: Sequence[dict[str, Any]], num_generations: int) -> list[dict[str, Any]]:
    """Each row `num_generations` times in a row (aabbcc), as the attempts of one prompt.

    A prompt's own ``_ng_rollout_index`` and ``_ng_rollout_id`` name one attempt, so the repeats
    don't carry them.

    Raises:
        RowTypeError: A row is no dictionary, or the count is no integer.
        RowValueError: The count is not positive.
    """
    check_count("num_generations", num_generations)
    repeated: list[dict[str, Any]] = []
    for index, row in enumerate(rows):
        _checked_row(row, index)
        prompt = row
        if num_generations > 1:
            prompt = {k: v for k, v in row.items() if k not in _ATTEMPT_FIELDS}
        repeated.extend([prompt] * num_generations)
    return repeated


def prepare_rows(
    rows: Sequence[dict[str, Any]],
    sampling: SamplingParams,
    sizes: GroupSizes,
    *,
    routes: Collection[str] | None = None,
    seed: int | None = None,
    is_training: bool = True,
) -> list[Row]:
    """Check, stamp and encode a whole batch.

    Args:
        rows: One dictionary an attempt, groups contiguous.
        sampling: The profile that is stamped on every row.
        sizes: How the rows hang together.
        routes: What rows may name; None: anything.
        seed: Of the run. Each row's sampling seed derives from it, the task index and the rollout
            index, so equal runs sample alike whatever completes first. None: rows are unseeded,
            but for a seed of their own.
        is_training: False lets a temperature of 0 pass.

    Raises:
        RowTypeError: A row, or a field of it, has the wrong type.
        RowValueError: A field's value can't be served, a row has no known route, or the sizes do
            not fit.
        UnsupportedOptionError: An option that does not reach the model through Gym.
    """
    refuse_unsupported(sampling, is_training=is_training)
    sizes.check(len(rows))
    run = uuid.uuid4().hex[:12]
    prepared: list[Row] = []
    checked: set[int] = set()
    lifter = ImageLifter()
    for index, given in enumerate(rows):
        row = _checked_row(given, index)
        route = row_route(row, index)
        if routes is not None and route not in routes:
            raise RowValueError(
                f"row {index}: nothing here is called {route!r} "
                f"(known: {', '.join(sorted(routes)) or 'nothing'})",
                row=index,
            )
        group, place = divmod(index, sizes.identity_size)
        task_index = _own_index(row, "_ng_task_index", index, default=group)
        rollout_index = _own_index(row, "_ng_rollout_index", index, default=place)
        # Agents are told their own; whoever knew another's could call, read and forget in its name.
        unguessable = secrets.token_hex(8)
        rollout_id = f"{run}-{task_index}-{rollout_index}-{index}-{unguessable}"
        row_seed = None if seed is None else sampling_seed(seed, task_index, rollout_index)
        body = {
            **(_group_of(f"{run}-{group}") if sizes.identity_size > 1 else {}),
            **row,
            "responses_create_params": _stamp(row, index, sampling, row_seed),
            "_rowidx": index,
            "_ng_task_index": task_index,
            "_ng_rollout_index": rollout_index,
            "_ng_rollout_id": rollout_id,
        }
        # Repeats of a prompt are one dictionary: its depths are searched once.
        encoded = encode_body(body, index, checked=id(given) in checked)
        checked.add(id(given))
        encoded, media = lifter.lift(encoded)
        prepared.append(
            Row(
                index=index,
                task_index=task_index,
                rollout_index=rollout_index,
                route=route,
                rollout_id=rollout_id,
                body=encoded,
                media=media,
            )
        )
    return prepared


def _group_of(name: str) -> dict[str, Any]:
    return {"_ng_group_id": name, "_ng_group_attempt": 0}


def next_attempt(row: Row, attempt: int) -> Row:
    """The same row under a rollout id of its own, so that two attempts are never mixed up.

    Args:
        row: As first prepared.
        attempt: From 1, the second dispatch.
    """
    body = msgspec.json.decode(row.body)
    rollout_id = f"{row.rollout_id}.{attempt}"
    body["_ng_rollout_id"] = rollout_id
    return msgspec.structs.replace(row, rollout_id=rollout_id, body=msgspec.json.encode(body))


def sampling_seed(run_seed: int, task_index: int, rollout_index: int) -> int:
    """A row's seed, in ``[0, 2**31)``: BLAKE2b of the three numbers.

    31 bits are what every server takes; within a prompt's group two are as good as never equal.
    """
    text = f"{run_seed}/{task_index}/{rollout_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") & 0x7FFF_FFFF


def _checked_row(row: object, index: int) -> dict[str, Any]:
    """The row, flat where it is a materialized task."""
    if not isinstance(row, dict):
        raise RowTypeError(
            f"row {index} is a {type(row).__name__}; a dictionary is needed", row=index
        )
    try:
        flat = dict(flat_row(row, index))
    except ConfigError as error:
        raise RowValueError(error.message, row=index) from error
    params = flat.get("responses_create_params")
    if not isinstance(params, dict):
        raise RowTypeError(
            f"row {index}: responses_create_params is a {type(params).__name__}; "
            "a dictionary with the request's input is needed",
            row=index,
        )
    return flat


def _own_index(row: dict[str, Any], field: str, index: int, *, default: int) -> int:
    value = row.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise RowTypeError(f"row {index}: {field}={value!r}: an integer is needed", row=index)
    if value < 0:
        raise RowValueError(f"row {index}: {field}={value}: must be 0 or more", row=index)
    return value


def _stamp(
    row: dict[str, Any], index: int, sampling: SamplingParams, seed: int | None
) -> dict[str, Any]:
    params = dict(row["responses_create_params"])
    for option in _UNSUPPORTED_PARAMS:
        if params.get(option):
            raise UnsupportedOptionError(
                f"row {index}: responses_create_params.{option}={params[option]!r} "
                "is not supported in rollouts through Gym: leave it out",
                setting=option,
            )
    if "tools" in params and (params["tools"] is None or params["tools"] == []):
        del params["tools"]  # vLLM refuses an empty list, and published data has them
    params["temperature"] = sampling.temperature
    params["top_p"] = sampling.top_p
    limit = _output_limit(params.get("max_output_tokens"), sampling.max_tokens, index)
    if limit is None:
        params.pop("max_output_tokens", None)
    else:
        params["max_output_tokens"] = limit
    if seed is not None:
        params["metadata"] = with_seed(params.get("metadata"), seed, index)
    return params


def _output_limit(own: object, configured: int | None, index: int) -> int | None:
    where = f"row {index}: responses_create_params.max_output_tokens={own!r}"
    if own is None:
        return configured
    if isinstance(own, bool) or not isinstance(own, int):
        raise RowTypeError(f"{where}: an integer is needed", row=index)
    if own <= 0:
        raise RowValueError(f"{where}: must be positive", row=index)
    return own if configured is None else min(own, configured)


def with_seed(metadata: object, seed: int, index: int) -> dict[str, Any]:
    """A request's metadata with the seed in ``extra_body``, as Gym lets request options travel.

    Args:
        metadata: As the row has it; not changed.
        seed: Of the row.
        index: The row's, for error messages.

    Raises:
        RowTypeError, RowValueError: The metadata is no mapping, or its ``extra_body`` is no JSON
            text of an object.
    """
    where = f"row {index}: responses_create_params.metadata"
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise RowTypeError(
            f"{where} is a {type(metadata).__name__}; a dictionary is needed", row=index
        )
    text = metadata.get("extra_body")
    if text is None:
        text = "{}"
    if not isinstance(text, str):
        raise RowTypeError(
            f"{where}.extra_body is a {type(text).__name__}; JSON text is needed", row=index
        )
    try:
        extra = msgspec.json.decode(text.encode("utf-8"))
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise RowValueError(f"{where}.extra_body is not JSON text: {error}", row=index) from error
    if not isinstance(extra, dict):
        raise RowValueError(f"{where}.extra_body holds no JSON object: {text[:200]!r}", row=index)
    return {**metadata, "extra_body": msgspec.json.encode({**extra, "seed": seed}).decode()}

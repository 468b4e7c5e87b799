"""A generator that answers from a script."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

import anyio
import anyio.lowlevel
import msgspec

from gymrl.config import SamplingParams
from gymrl.errors import GenerationError
from gymrl.generation.base import Generated, TokenCallback, token_budget
from gymrl.generation.images import PromptImages

Answer = Callable[[list[int], SamplingParams], Generated | Awaitable[Generated]]


class RecordedCall(msgspec.Struct, frozen=True):
    """One call that the generator received; `images` are those of its prompt, None without any."""

    prompt_ids: list[int]
    sampling: SamplingParams
    images: PromptImages | None = None


class ScriptedGenerator:
    """Answers calls from a list, in order of arrival, or from a function of the prompt.

    An answer longer than the call's budget is cut there and ends with ``length``, as a real
    generator would have it.

    Args:
        script: The answers, or a function (plain or async) that makes one. A list of token ids
            stands for those tokens with a log-probability of -0.5 each and ``stop``.
        max_model_len: Context in tokens.
    """

    def __init__(
        self, script: Iterable[Generated | Sequence[int]] | Answer, *, max_model_len: int = 4096
    ) -> None:
        self._answer = script if callable(script) else None
        self._script = iter(()) if callable(script) else iter(script)
        self._max_model_len = max_model_len
        self._closed = False
        self.calls: list[RecordedCall] = []
        self.cancelled = 0

    @property
    def max_model_len(self) -> int:
        """Context in tokens."""
        return self._max_model_len

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        on_token: TokenCallback | None = None,
    ) -> Generated:
        """See :meth:`gymrl.generation.base.Generator.generate`.

        Raises:
            GenerationError: The script has no answer left, or the generator is closed.
        """
        return await self._call(RecordedCall(list(prompt_ids), sampling), on_token)

    async def _call(self, call: RecordedCall, on_token: TokenCallback | None) -> Generated:
        if self._closed:
            raise GenerationError("the generator is closed")
        prompt_ids, sampling = call.prompt_ids, call.sampling
        budget = token_budget(len(prompt_ids), sampling, self._max_model_len)
        self.calls.append(call)
        try:
            # A real generator never answers before others have had their turn.
            await anyio.lowlevel.checkpoint()
            answer = await self._next(prompt_ids, sampling)
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        if len(answer.token_ids) > budget:
            answer = Generated(
                token_ids=answer.token_ids[:budget],
                logprobs=answer.logprobs[:budget],
                finish_reason="length",
            )
        if on_token is not None:
            for token_id, logprob in zip(answer.token_ids, answer.logprobs, strict=True):
                on_token(token_id, logprob)
        return answer

    async def _next(self, prompt_ids: list[int], sampling: SamplingParams) -> Generated:
        if self._answer is not None:
            answer = self._answer(prompt_ids, sampling)
            return answer if isinstance(answer, Generated) else await answer
        scripted = next(self._script, None)
        if scripted is None:
            raise GenerationError(f"the script has no answer for call {len(self.calls)}")
        if isinstance(scripted, Generated):
            return scripted
        return Generated(
            token_ids=list(scripted), logprobs=[-0.5] * len(scripted), finish_reason="stop"
        )

    async def close(self) -> None:
        """Refuse further calls."""
        self._closed = True


class ScriptedImageGenerator(ScriptedGenerator):
    """A scripted generator that takes prompts with images; `calls` say which."""

    async def generate_with_images(
        self,
        prompt_ids: Sequence[int],
        images: PromptImages,
        sampling: SamplingParams,
        *,
        on_token: TokenCallback | None = None,
    ) -> Generated:
        """See :meth:`gymrl.generation.images.ImageGenerator.generate_with_images`.

        Raises:
            GenerationError: As :meth:`generate`.
        """
        return await self._call(RecordedCall(list(prompt_ids), sampling, images), on_token)

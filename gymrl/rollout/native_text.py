"""Text to tokens and back for native rollouts.

The model's own tokens are never encoded from text. Only what comes from outside is: the first
prompt, once, and each observation, which is appended to the tokens sampled so far.

A codec that has the model's image format writes its placeholder for each image of a message; whoever
asks for the tokens puts the images' regions in their places (:mod:`gymrl.rollout.native_images`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gymrl.errors import PrefixError
from gymrl.generation.chat import ChatFormat
from gymrl.media.parts import is_image_part

if TYPE_CHECKING:
    from gymrl.environments.base import Message
    from gymrl.generation.images import ImageFormat

_PROBE = "\u00b6gymrl\u00b6"
_TEMPLATE_ROLES = frozenset({"system", "user", "assistant", "tool"})


class TextCodec(Protocol):
    """How conversations are written as tokens.

    One that writes images has an attribute ``images`` as well
    (:class:`gymrl.rollout.native_images.WritesImages`); others get messages of text alone.
    """

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a first prompt, up to where the model goes on."""
        ...

    def encode_observation(self, observation: Message, sampled_ids: Sequence[int]) -> list[int]:
        """Ids that follow an answer of the model, up to where it goes on.

        Args:
            observation: The environment's message.
            sampled_ids: The answer as sampled; whether it ended its turn can be seen on it.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, as environments read it."""
        ...


class RawText:
    """Contents as they are, one after the other, without roles or a template.

    For base models, and for environments that write the model's format themselves.

    Args:
        tokenizer: Of transformers, or anything with ``encode(text, add_special_tokens=False)``
            and ``decode(ids, skip_special_tokens=True)``.
        images: How the model's prompts hold images; None: it writes text only.
    """

    def __init__(self, tokenizer: Any, *, images: ImageFormat | None = None) -> None:
        self.images = images
        self._tokenizer = tokenizer

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """See :meth:`TextCodec.encode_prompt`."""
        contents = [message["content"] for message in messages]
        if all(isinstance(content, str) for content in contents):
            return self._encode("".join(contents))
        return [token_id for content in contents for token_id in self._content(content)]

    def encode_observation(self, observation: Message, sampled_ids: Sequence[int]) -> list[int]:
        """See :meth:`TextCodec.encode_observation`."""
        return self._content(observation["content"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """See :meth:`TextCodec.decode`."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def _content(self, content: Any) -> list[int]:
        if isinstance(content, str):
            return self._encode(content)
        ids: list[int] = []
        for part in content:
            if not is_image_part(part):
                ids += self._encode(part["text"])
            elif self.images is not None:
                ids += self.images.placeholder
        return ids

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


class ChatText:
    """Conversations in the tokenizer's chat template.

    An observation is rendered as the turn that follows an assistant's, by the template itself: the
    end of the assistant's turn where the model did not write it, the message, and the opening of
    the next assistant's turn. A role that templates do not know (``environment``) is a user's.

    Args:
        chat: The tokenizer's format; :meth:`from_tokenizer` makes it.
        images: How the model's prompts hold images; None: it writes text only.
    """

    def __init__(self, chat: ChatFormat, *, images: ImageFormat | None = None) -> None:
        self.images = images
        self._chat = chat

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, *, images: ImageFormat | None = None) -> ChatText:
        """With everything read off the tokenizer's template.

        Args:
            tokenizer: Of transformers.
            images: As above; :func:`gymrl.generation.image_inputs.load_image_format` makes it.

        Raises:
            GenerationRequestError: The tokenizer has no chat template.
        """
        return cls(ChatFormat(tokenizer), images=images)

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """See :meth:`TextCodec.encode_prompt`."""
        return self._chat.render([_known(message) for message in messages])

    def encode_observation(self, observation: Message, sampled_ids: Sequence[int]) -> list[int]:
        """See :meth:`TextCodec.encode_observation`.

        Raises:
            PrefixError: The template writes no end of turn after an assistant's message.
        """
        # What a template writes after a turn does not depend on what was said before, so a short
        # stand-in conversation gives it at a cost that does not grow with the episode.
        conversation = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": _PROBE},
            _known(observation),
        ]
        rendered = self._chat.write(conversation)
        _, found, tail = rendered.partition(_PROBE)
        ids = self._chat.encode(tail)
        ends = self._chat.end_ids
        if not found or not ids or ids[0] not in ends:
            raise PrefixError(
                f"the chat template writes none of the end-of-turn tokens {sorted(ends)} right "
                "after an assistant's text; use a template that closes assistant turns, or RawText",
                received=ids[:4],
            )
        is_closed = bool(sampled_ids) and sampled_ids[-1] in ends
        return ids[1:] if is_closed else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """See :meth:`TextCodec.decode`."""
        return self._chat.decode(token_ids)


def _known(message: Message) -> Message:
    """The message as templates know it: a role of theirs, parts that say what they are alone."""
    role = message["role"] if message["role"] in _TEMPLATE_ROLES else "user"
    content = message["content"]
    if isinstance(content, str):
        return message if role == message["role"] else {"role": role, "content": content}
    parts = [
        {"type": "image"} if is_image_part(part) else {"type": "text", "text": part["text"]}
        for part in content
    ]
    return {"role": role, "content": parts}

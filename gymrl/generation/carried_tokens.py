"""The tokens of earlier calls that messages and items of requests carry."""

from __future__ import annotations

import re

import msgspec

from gymrl.errors import GenerationRequestError
from gymrl.generation.prefix import TruePrefix

_FIELDS = ("prompt_token_ids", "generation_token_ids")
_NULL = msgspec.Raw(b"null")
_PLACE = re.compile(r" - at `\$(.*)`$")
_decode_ids = msgspec.json.Decoder(list[int]).decode


class TokenCarrier(msgspec.Struct, kw_only=True):
    """A message or an item that may carry the tokens of the call that gave it.

    They stay as they came until they are asked for. Each answer of a conversation carries all that
    was before it, so that reading every one of them takes time in the square of its turns; only the
    newest answer's are continued from.
    """

    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    generation_token_ids: msgspec.Raw = msgspec.Raw()

    def carries_tokens(self, where: str) -> bool:
        """Whether it does.

        Args:
            where: Its place in the request.

        Raises:
            GenerationRequestError: It carries one of the two fields without the other.
        """
        missing = [name for name in _FIELDS if not _is_given(getattr(self, name))]
        if len(missing) == 1:
            raise GenerationRequestError(
                f"{where} carries token ids without {missing[0]}; send both fields back as they came",
                param=f"{where}.{missing[0]}",
            )
        return not missing

    def tokens(self, where: str) -> TruePrefix:
        """What it carries.

        Args:
            where: Its place in the request.

        Raises:
            GenerationRequestError: It is no list of ids, or there is no prompt.
        """
        prefix = TruePrefix(*(_read(getattr(self, name), f"{where}.{name}") for name in _FIELDS))
        if not prefix.prompt_token_ids:
            raise GenerationRequestError(
                f"{where}.prompt_token_ids is empty, and nothing is sampled from no prompt; send both "
                "fields back as they came, or leave both out",
                param=f"{where}.prompt_token_ids",
            )
        return prefix


def _is_given(field: msgspec.Raw) -> bool:
    return len(field) > 0 and field != _NULL


def _read(field: msgspec.Raw, where: str) -> list[int]:
    try:
        return _decode_ids(field)
    except msgspec.ValidationError as error:
        found = _PLACE.search(str(error))
        place = where if found is None else where + found[1]
        text = _PLACE.sub("", str(error))
        raise GenerationRequestError(f"{text} - at `$.{place}`", param=place) from None

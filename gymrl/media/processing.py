"""Images as a model's inputs, made by the model's own processor.

The processor is used for images alone: it is fed one placeholder an image, and what it makes of
that text is thrown away, for the tokens of a trajectory are those that were sampled from. (The
trajectory's own text would not do: its placeholders are expanded already.)

Needs torch, and transformers where a processor is to be loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from gymrl.errors import ConfigError, MediaError, UnsupportedOptionError
from gymrl.extras import optional_imports
from gymrl.media.images import open_image
from gymrl.media.packing import EXACT_SIZES, pack, padded_stack

with optional_imports():
    import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gymrl.media.images import EncodedImage

PROBE_PIXELS = 112
"""Width and height of the blank image that a processor is tried with."""

KEPT_SIZES = 1024
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
TEXT_KEYS = frozenset({"input_ids", "attention_mask", *TOKEN_TYPES})


class ImageProcessor:
    """A vision model's processor, for images.

    Args:
        processor: Of transformers or of its kind: called with ``text``, ``images`` and
            ``return_tensors``; has ``image_processor``, ``image_token`` and ``tokenizer``.
        pad_dynamic_image_shapes: Where images of several sizes come out as a list of ``[C, H, W]``,
            make one tensor of them, padded with zeros on the right and at the bottom; their exact
            sizes are ``imgs_sizes``, int32 ``[N, 2]`` (height, width).

    Attributes:
        pack_dims: For each model input that images have, the dimension that counts images (or
            their patches or tiles).
        token_type_names: Inputs of the text that say which of its tokens are images.

    Raises:
        UnsupportedOptionError: The processor can't be used so; says why. It is tried with one and
            with two blank images.
    """

    def __init__(self, processor: Any, *, pad_dynamic_image_shapes: bool = False) -> None:
        self._processor = processor
        self._pads = pad_dynamic_image_shapes
        self._name = type(processor).__name__
        self._image_token, self.image_token_id = self._placeholder()
        self._sizes: OrderedDict[tuple[int, int], int] = OrderedDict()
        self.token_type_names: tuple[str, ...] = ()
        self.pack_dims = self._probe()

    @classmethod
    def load(cls, model: str, *, pad_dynamic_image_shapes: bool = False) -> ImageProcessor:
        """The processor of a model.

        Args:
            model: A directory or hub id.
            pad_dynamic_image_shapes: As above.

        Raises:
            ConfigError: There is none, or it can't be loaded here.
            UnsupportedOptionError: As above.
        """
        try:
            import transformers  # noqa: PLC0415 - only who has no processor yet needs it

            processor = transformers.AutoProcessor.from_pretrained(model)
        except (ImportError, OSError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"processor={model!r} can't be loaded: {error}", setting="processor"
            ) from error
        return cls(processor, pad_dynamic_image_shapes=pad_dynamic_image_shapes)

    def tokens_of(self, width: int, height: int) -> int:
        """How many placeholders an image of this size takes in a prompt.

        Raises:
            MediaError: The processor refuses an image of this size.
        """
        size = (width, height)
        if size not in self._sizes:
            outputs = self._call([_blank(width, height)])
            self._sizes[size] = self._count(outputs)
            if len(self._sizes) > KEPT_SIZES:
                self._sizes.popitem(last=False)
        self._sizes.move_to_end(size)
        return self._sizes[size]

    def model_inputs(self, images: Sequence[EncodedImage]) -> dict[str, torch.Tensor]:
        """The model inputs of the images of one message, packed in their order.

        Args:
            images: At least one.

        Returns:
            ``pixel_values`` and whatever else the processor gives (``image_grid_thw``, ...).

        Raises:
            MediaError: An image is broken, the processor refuses one, or it gives images of
                several shapes and `pad_dynamic_image_shapes` is off.
        """
        opened = [open_image(image) for image in images]
        outputs = self._call(opened, ragged=self._pads and len(opened) > 1)
        inputs: dict[str, torch.Tensor] = {}
        for name, value in outputs.items():
            if self._is_text(name, value, outputs):
                continue
            if isinstance(value, torch.Tensor | np.ndarray):
                inputs[name] = torch.as_tensor(value)
            else:
                inputs |= padded_stack(name, value, exact_sizes=outputs.get(EXACT_SIZES))
        return self._with_exact_sizes(inputs) if self._pads else inputs

    @staticmethod
    def _with_exact_sizes(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs with the sizes that padding with other messages would hide."""
        pixels = inputs.get("pixel_values")
        if EXACT_SIZES in inputs:
            inputs[EXACT_SIZES] = inputs[EXACT_SIZES].to(torch.int32)
        elif pixels is not None and pixels.ndim == 4:
            height, width = pixels.shape[-2:]
            sizes = torch.tensor([[height, width]], dtype=torch.int32)
            inputs[EXACT_SIZES] = sizes.repeat(pixels.shape[0], 1)
        return inputs

    def token_types(self, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inputs that say which tokens are images, where the model takes any.

        Args:
            token_ids: Of any shape, padded or not.

        Returns:
            ``mm_token_type_ids`` or ``token_type_ids``: 1 at placeholders, 0 elsewhere.
        """
        is_image = (token_ids == self.image_token_id).long()
        return dict.fromkeys(self.token_type_names, is_image)

    def pack(self, parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The inputs of several messages as one model call takes them.

        Raises:
            MediaError: Shapes differ and `pad_dynamic_image_shapes` is off.
        """
        return pack(parts, self.pack_dims, pads=self._pads)

    # --- what the processor is -------------------------------------------------------------------

    def _placeholder(self) -> tuple[str, int]:
        if getattr(self._processor, "image_processor", None) is None:
            raise self._refused("it has no image_processor: it is a tokenizer, or of another kind")
        token = getattr(self._processor, "image_token", None)
        if not isinstance(token, str) or not token:
            raise self._refused("it has no image_token, one of which stands for each image")
        tokenizer = getattr(self._processor, "tokenizer", None)
        token_id = getattr(self._processor, "image_token_id", None)
        if token_id is None and tokenizer is not None:
            token_id = tokenizer.convert_tokens_to_ids(token)
        if not isinstance(token_id, int) or token_id == getattr(tokenizer, "unk_token_id", None):
            raise self._refused(f"its image_token {token!r} is no token of its tokenizer")
        return token, token_id

    def _probe(self) -> dict[str, int]:
        """Which dimension of each input counts images, from what one and two images give."""
        blank = _blank(PROBE_PIXELS, PROBE_PIXELS)
        try:
            one, two = self._call([blank]), self._call([blank, blank])
        except MediaError as error:
            raise self._refused(f"it fails on blank images ({error.message})") from error
        count = self._count(one)
        if not count or self._count(two) != 2 * count:
            raise self._refused(
                f"one image is {count} tokens {self._image_token!r} and two are "
                f"{self._count(two)}; images can't be told apart so"
            )
        is_image = one["input_ids"] == self.image_token_id
        self.token_type_names = tuple(
            name for name in TOKEN_TYPES if name in one and torch.equal(one[name] != 0, is_image)
        )
        names = [name for name, value in one.items() if not self._is_text(name, value, one)]
        return {name: self._grows(name, one[name], two.get(name)) for name in names}

    def _grows(self, name: str, one: Any, two: Any) -> int:
        shapes = [tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in (one, two)]
        first, second = shapes
        if first is not None and second is not None and len(first) == len(second):
            grown = [d for d in range(len(first)) if first[d] != second[d]]
            if len(grown) == 1 and second[grown[0]] == 2 * first[grown[0]]:
                return grown[0]
        raise self._refused(
            f"its {name} has the shapes {shapes[0]} and {shapes[1]} for one and for two images; "
            "exactly one dimension must count images"
        )

    def _call(self, images: list[Any], *, ragged: bool = False) -> dict[str, Any]:
        text = self._image_token * len(images)
        try:
            outputs = self._processor(
                text=text, images=images, return_tensors=None if ragged else "pt"
            )
        except Exception as error:  # processors raise nearly anything
            sizes = [image.size for image in images]
            hint = "" if self._pads or len(set(sizes)) < 2 else "; set pad_dynamic_image_shapes"
            raise MediaError(
                f"{self._name} can't process images of {sizes}: {type(error).__name__}: "
                f"{error}{hint}"
            ) from error
        return dict(outputs)

    def _count(self, outputs: dict[str, Any]) -> int:
        ids = torch.as_tensor(outputs["input_ids"])
        return int((ids == self.image_token_id).sum())

    @staticmethod
    def _is_text(name: str, value: Any, outputs: dict[str, Any]) -> bool:
        """Whether an output is of the text: its shape is that of the token ids."""
        if name in TEXT_KEYS:
            return True
        ids = outputs["input_ids"]
        both = isinstance(value, torch.Tensor) and isinstance(ids, torch.Tensor)
        return both and value.shape == ids.shape

    def _refused(self, why: str) -> UnsupportedOptionError:
        return UnsupportedOptionError(
            f"processor {self._name}: {why}; give the processor of a model that marks each image "
            "by placeholder tokens in its prompt",
            setting="processor",
        )


def _blank(width: int, height: int) -> Any:
    from PIL import Image  # noqa: PLC0415 - loaded with the first image

    return Image.new("RGB", (width, height))

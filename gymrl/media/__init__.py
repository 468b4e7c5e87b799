"""Images: what names them, where they may come from, how large they may be.

Both sides of a rollout read images here, so that the model that sampled and the trainer see the
same pixels. Importing this loads no image library; Pillow is loaded with the first image.
"""

from gymrl.media.images import (
    EncodedImage,
    encode_picture,
    inspect_image,
    open_image,
)
from gymrl.media.lifting import ImageLifter, lift_images, reference_digest, restore_images
from gymrl.media.loading import load_image
from gymrl.media.sharing import MediaExchange, MediaPayload
from gymrl.media.sources import (
    IMAGE_SOURCE_PREFIXES,
    decode_data_url,
    is_allowed_source,
    looks_like_image_source,
    to_data_url,
)

__all__ = [
    "IMAGE_SOURCE_PREFIXES",
    "EncodedImage",
    "ImageLifter",
    "MediaExchange",
    "MediaPayload",
    "decode_data_url",
    "encode_picture",
    "inspect_image",
    "is_allowed_source",
    "lift_images",
    "load_image",
    "looks_like_image_source",
    "open_image",
    "reference_digest",
    "restore_images",
    "to_data_url",
]

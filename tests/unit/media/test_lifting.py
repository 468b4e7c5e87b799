"""Images out of JSON and back in."""

from __future__ import annotations

import base64
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.media import ImageLifter, lift_images, restore_images

CAT = b"\x89PNG cat"
DOG = b"\xff\xd8 dog"


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def test_an_image_that_stands_twice_is_held_once_and_comes_back_twice():
    body = json.dumps({"a": url(CAT), "b": [url(DOG), url(CAT)]}).encode()
    skeleton, media = lift_images(body)
    assert sorted(media.values()) == sorted([CAT, DOG])
    assert b"base64,i" not in skeleton
    assert json.loads(skeleton).keys() == {"a", "b"}
    assert restore_images(skeleton, media) == body


def test_the_same_image_under_another_type_comes_back_under_its_own():
    body = json.dumps([url(CAT), url(CAT, "webp"), url(CAT).replace("data", "DATA")]).encode()
    skeleton, media = lift_images(body)
    assert list(media.values()) == [CAT]
    assert restore_images(skeleton, media) == body


def test_equal_images_of_many_bodies_are_one_object():
    lifter = ImageLifter()
    first, second = (lifter.lift(json.dumps([url(CAT), n]).encode())[1] for n in range(2))
    ((one,), (other,)) = first.values(), second.values()
    assert one is other


def test_what_does_not_read_back_the_same_stays_in_its_place():
    padding = '"data:image/png;base64,QUI="'
    loose = '"data:image/png;base64,QUJ="'  # other spare bits, the same bytes
    broken = '"data:image/png;base64,Q"'
    escaped = '"data:image\\/png;base64,QUI="'
    inside = json.dumps(json.dumps({"image_url": url(CAT)}))
    body = f"[{loose},{broken},{escaped},{inside},{padding}]".encode()
    skeleton, media = lift_images(body)
    assert list(media.values()) == [b"AB"]
    for text in (loose, broken, escaped, inside):
        assert text.encode() in skeleton
    assert restore_images(skeleton, media) == body


def test_a_text_with_the_form_of_a_reference_is_never_filled_in():
    _, media = lift_images(json.dumps([url(CAT)]).encode())
    (digest,) = media
    forged = json.dumps([f"gymrl-image:{digest}:data:image/png;base64,", url(CAT)]).encode()
    skeleton, lifted = lift_images(forged)
    assert (skeleton, lifted) == (forged, {})
    assert restore_images(skeleton, lifted) == forged


json_values = st.recursive(
    st.none()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(["data:image/png;base64,", '"data:image/png;base64,QQ=="', "\\"])
    | st.binary(max_size=12).map(url)
    | st.binary(max_size=12).map(lambda data: url(data)[:-1]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=60)
@given(json_values, st.booleans())
def test_lifting_and_restoring_gives_the_same_bytes(value, is_ascii):
    body = json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    skeleton, media = lift_images(body)
    assert restore_images(skeleton, media) == body
    json.loads(skeleton)

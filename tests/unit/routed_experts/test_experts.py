import numpy as np
import pytest

from gymrl.routed_experts import (
    RouteFormatError,
    count_experts,
    fit_routes,
    missing_routes,
    routes_dtype,
    signed_routes,
)


@pytest.mark.parametrize(
    ("num_experts", "name"),
    [
        (1, "int8"),
        (8, "int8"),
        (128, "int8"),
        (129, "int16"),
        (256, "int16"),
        (32768, "int16"),
        (32769, "int32"),
        (None, "int16"),
    ],
)
def test_the_type_of_routes_is_the_narrowest_signed_one_for_the_number_of_experts(
    num_experts, name
):
    assert routes_dtype(num_experts) == name


class TextConfig:
    n_routed_experts = 160


class VisionLanguageConfig:
    text_config = TextConfig()


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"num_experts": 128}, 128),
        ({"n_routed_experts": 256}, 256),
        ({"num_local_experts": 8}, 8),
        ({"text_config": {"num_experts": 64}}, 64),
        ({"num_experts": None, "text_config": {"num_local_experts": 32}}, 32),
        ({"num_experts": 0}, None),
        ({"num_experts": True}, None),
        ({"num_experts": "many"}, None),
        ({}, None),
        ({"text_config": None}, None),
        (TextConfig(), 160),
        (VisionLanguageConfig(), 160),
    ],
)
def test_the_number_of_experts_is_read_from_the_models_configuration(config, count):
    assert count_experts(config) == count


def test_signed_routes_are_taken_without_a_copy():
    routes = np.zeros((2, 1, 1), dtype=np.int16)

    assert np.shares_memory(signed_routes(routes), routes)
    assert fit_routes(routes, "int16") is routes


def test_an_id_below_the_sentinel_is_refused():
    with pytest.raises(RouteFormatError, match="-3 is no expert id"):
        signed_routes(np.array([[[-3]]], dtype=np.int8))


def test_missing_routes_are_signed_sentinels():
    routes = missing_routes(3, 2, 4, "int8")

    assert routes.dtype == np.int8
    assert routes.shape == (3, 2, 4)
    assert (routes == -1).all()

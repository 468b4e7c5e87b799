import pytest

import gymrl


@pytest.mark.parametrize("name", gymrl.__all__)
def test_every_public_name_is_there(name):
    assert getattr(gymrl, name) is not None


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        gymrl.no_such_name  # noqa: B018 - the access is the test

import aiohttp
import pytest

from gymrl.errors import (
    ActorDiedError,
    GymRequestError,
    GymTransportError,
    RolloutDataFailure,
    RolloutTimeout,
    RowValueError,
    ServerDiedError,
)
from gymrl.gym.client import (
    CHAIN_LIMIT,
    HttpAnswer,
    HttpPool,
    chain_of,
    failure_kind_of,
    failure_of,
    raise_for_status,
)


class WithStatus(Exception):
    def __init__(self, status):
        super().__init__("said so")
        self.status = status


def chained(outer, inner):
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (GymTransportError("x"), "infra"),
        (RolloutTimeout("x"), "infra"),
        (ServerDiedError("x"), "infra"),
        (ActorDiedError("x"), "infra"),
        (ConnectionResetError(), "infra"),
        (TimeoutError(), "infra"),
        (aiohttp.ServerDisconnectedError(), "infra"),
        (RolloutDataFailure("x"), "data"),
        (GymRequestError("x"), "data"),
        (RowValueError("x"), "data"),
        (KeyError("x"), "data"),
        (WithStatus(503), "infra"),
        (WithStatus(500), "infra"),
        (WithStatus(429), "infra"),
        (WithStatus(408), "infra"),
        (WithStatus(400), "data"),
        (WithStatus(422), "data"),
        (chained(RuntimeError("outer"), WithStatus(503)), "infra"),
        (chained(ConnectionError("outer"), WithStatus(400)), "data"),
        (chained(RuntimeError("outer"), chained(ValueError("b"), TimeoutError())), "infra"),
        (chained(RolloutDataFailure("outer"), ConnectionError()), "data"),
    ],
)
def test_a_status_decides_before_a_type_and_the_chain_is_looked_through(error, kind):
    assert failure_kind_of(error) == kind


def test_a_circular_chain_of_causes_ends():
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert list(chain_of(first)) == [first, second]
    assert failure_of(first).message == "a"


def test_a_long_chain_of_causes_is_cut():
    error = RuntimeError("innermost")
    for _ in range(CHAIN_LIMIT * 2):
        error = chained(RuntimeError("link"), error)
    assert len(list(chain_of(error))) == CHAIN_LIMIT


def test_a_failure_carries_the_errors_facts_and_traceback():
    try:
        try:
            raise ConnectionResetError("by peer")
        except ConnectionResetError as cause:
            raise GymTransportError(
                "http://a/run: reset", url="http://a/run", status=502
            ) from cause
    except GymTransportError as error:
        failure = failure_of(error, row=3, agent="a")
    assert (failure.kind, failure.error, failure.row, failure.agent) == (
        "infra",
        "GymTransportError",
        3,
        "a",
    )
    assert (failure.url, failure.status) == ("http://a/run", 502)
    assert "ConnectionResetError: by peer" in failure.traceback
    assert failure.fields == {"url": "http://a/run", "status": 502}


def test_row_zero_of_the_error_is_kept():
    assert failure_of(GymTransportError("x", row=0), row=5).row == 0


def test_an_error_whose_text_cannot_be_made_is_a_failure_all_the_same():
    """python/cpython#79492: somebody else's exception must not end the stream."""

    class Unprintable(Exception):
        def __str__(self):
            raise ValueError("no text")

    failure = failure_of(Unprintable())
    assert failure.error == "Unprintable"
    assert "cannot be made: ValueError" in failure.message


def test_the_text_of_a_failure_is_bounded_and_can_travel():
    failure = failure_of(RuntimeError("a\ud800" + "x" * 10_000_000))
    assert len(failure.message) == 2000
    assert len(failure.traceback) <= 8000
    assert failure.message.encode()


def test_a_refused_row_says_status_url_and_the_bodys_beginning():
    answer = HttpAnswer(url="http://a/run", status=400, body=b"maximum context length" * 1000)
    with pytest.raises(GymRequestError, match="HTTP 400 from http://a/run") as caught:
        raise_for_status(answer, "row 3")
    assert caught.value.body.startswith("maximum context length")
    assert len(caught.value.body) == 2000


@pytest.mark.parametrize(
    "url", ["nope", "http://", "http://a:99999/", "ftp://x/", "file:///etc/hosts"]
)
async def test_what_is_no_http_url_is_the_rows_own_fault(url):
    async with HttpPool() as pool:
        with pytest.raises(GymRequestError, match="is no URL that can be requested"):
            await pool.get(url)


async def test_a_pool_that_is_not_open_says_how_to_open_it():
    with pytest.raises(RuntimeError, match="async context manager"):
        await HttpPool().get("http://127.0.0.1:1/")


@pytest.mark.parametrize("status", [200, 204, 302])
def test_a_status_below_400_is_no_failure(status):
    raise_for_status(HttpAnswer(url="u", status=status, body=b""), "row 3")

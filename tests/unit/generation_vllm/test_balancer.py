import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gymrl.errors import ConfigError, GenerationTransportError
from gymrl.generation.balancer import Balancer

URLS = ["http://a", "http://b", "http://c"]


def test_the_least_busy_server_takes_the_call():
    balancer = Balancer(URLS)
    with balancer.lease() as one, balancer.lease() as two:
        assert (one.url, two.url) == ("http://a", "http://b")
        with balancer.lease() as three:
            assert three.url == "http://c"
        with balancer.lease() as again:
            assert again.url == "http://c"


def test_equals_take_turns():
    balancer = Balancer(URLS)
    taken = []
    for _ in range(6):
        with balancer.lease() as upstream:
            taken.append(upstream.url)
    assert taken == URLS * 2


def test_a_server_that_is_out_gets_no_calls():
    balancer = Balancer(URLS)
    balancer.upstreams[0].out_because = "connection refused"
    taken = set()
    for _ in range(6):
        with balancer.lease() as upstream:
            taken.add(upstream.url)
    assert taken == {"http://b", "http://c"}
    assert [upstream.url for upstream in balancer.out()] == ["http://a"]


def test_a_call_does_not_return_to_a_server_that_refused_it():
    balancer = Balancer(URLS)
    with balancer.lease({"http://a", "http://b"}) as upstream:
        assert upstream.url == "http://c"


def test_when_nobody_is_left_the_error_says_why_for_each():
    balancer = Balancer(URLS[:2])
    balancer.upstreams[0].out_because = "HTTP 503"
    with pytest.raises(GenerationTransportError) as caught, balancer.lease({"http://b"}):
        pass
    assert str(caught.value) == (
        "no vLLM server can take the call; http://a: HTTP 503; http://b: refused the call"
    )


def test_a_call_that_fails_gives_its_place_back():
    balancer = Balancer(URLS[:1])
    with pytest.raises(LookupError), balancer.lease():
        raise LookupError
    assert balancer.upstreams[0].in_flight == 0


@pytest.mark.parametrize("urls", [[], ["http://a", "http://a"]])
def test_servers_are_named_once_each(urls):
    with pytest.raises(ConfigError, match="each once"):
        Balancer(urls)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
def test_load_never_differs_by_more_than_one_while_calls_only_begin(begins, size):
    balancer = Balancer([f"http://{n}" for n in range(size)])
    with contextlib.ExitStack() as stack:
        for _ in begins:
            stack.enter_context(balancer.lease())
            counts = [upstream.in_flight for upstream in balancer.upstreams]
            assert max(counts) - min(counts) <= 1
    assert all(upstream.in_flight == 0 for upstream in balancer.upstreams)

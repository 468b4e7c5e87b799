import asyncio
import concurrent.futures
import os
import signal
import sys
import threading
import time

import pytest

from gymrl.errors import RolloutStreamError, RowValueError
from gymrl.rollout.sync import SyncRolloutEngine

MAIN = threading.main_thread().ident


def wait_until(condition):
    while not condition():
        time.sleep(0.01)


def is_in(function):
    """Whether the main thread is somewhere in a call of the function."""
    frame = sys._current_frames()[MAIN]
    while frame is not None:
        if frame.f_code is function.__code__:
            return True
        frame = frame.f_back
    return False


@pytest.fixture
def hears_interrupts():
    """This process may be deaf to them: a script has started it in its background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def make_sync(make_engine):
    """A blocking engine over fake workers."""

    def make(**settings):
        opened = make_engine(**settings)
        return SyncRolloutEngine(opened.config, fleet=opened.fleet)

    return make


def test_groups_come_back_without_an_event_loop_in_sight(make_sync, row, tmp_path):
    with make_sync(num_workers=2) as engine:
        groups = engine.run([row(delay=0.1), row()], num_generations=2)
        engine.health_check()
        assert [group.index for group in groups] == [0, 1]
        came = tmp_path / "the second row came"
        streamed = []
        for group in engine.stream([row(until=str(came)), row()]):
            streamed.append(group.index)
            came.touch()
        assert streamed == [1, 0]
        assert engine.progress.rows_done == 6


def test_it_works_twice_in_a_process_and_from_a_thread(make_sync, row):
    done = []

    def once():
        with make_sync() as engine:
            done.append(len(engine.run([row()])))

    once()
    once()
    thread = threading.Thread(target=once)
    thread.start()
    thread.join()
    assert done == [1, 1, 1]


def test_several_threads_may_use_one_engine(make_sync, row):
    sizes = []
    with make_sync() as engine:
        threads = [
            threading.Thread(target=lambda: sizes.append(len(engine.run([row(), row()]))))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sizes == [2, 2, 2, 2]


async def test_it_is_refused_where_an_event_loop_runs(make_sync, row):
    with pytest.raises(RuntimeError, match="RolloutEngine"):
        with make_sync():
            pytest.fail("it opened")


def test_its_calls_are_refused_where_an_event_loop_runs(make_sync, row):
    with make_sync() as engine:

        async def call():
            engine.run([row()])

        with pytest.raises(RuntimeError, match="event loop runs in this thread"):
            asyncio.run(call())


def test_leaving_a_stream_early_ends_what_is_in_flight(make_sync, row, log):
    with make_sync() as engine:
        for _ in engine.stream([row(), row(delay=60)]):
            break
        assert log.read_text().count("left") == 1
        assert len(engine.run([row()])) == 1


def test_a_stream_that_outlives_its_engine_has_ended(make_sync, row):
    with make_sync() as engine:
        stream = engine.stream([row(), row(delay=60)])
        assert next(stream).index == 0
    stream.close()


def test_what_is_left_of_a_stream_after_its_engine_says_why_it_ended(make_sync, row):
    with make_sync(in_process=True) as engine:
        begun, other = engine.stream([row(), row(delay=60)]), engine.stream([row()])
        next(begun)
    for stream in (begun, other):
        with pytest.raises(RolloutStreamError, match="the engine was left before its stream"):
            next(stream)
        stream.close()


def test_errors_arrive_as_themselves(make_sync, row):
    with make_sync() as engine:
        with pytest.raises(RowValueError, match="nope"):
            engine.run([row("nope")])
        with pytest.raises(RolloutStreamError, match="NoGenerationError"):
            engine.run([row(fail_times=9)])


@pytest.mark.usefixtures("hears_interrupts")
def test_an_interrupt_ends_the_call_and_leaves_the_engine_usable(make_sync, row, log):
    def interrupt():
        wait_until(lambda: "run" in log.read_text())
        signal.pthread_kill(MAIN, signal.SIGINT)

    with make_sync() as engine:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            engine.run([row(delay=300)])
        thread.join()
        assert log.read_text().count("left") == 1
        assert len(engine.run([row()])) == 1


@pytest.mark.usefixtures("hears_interrupts")
def test_a_second_interrupt_is_raised_as_itself_and_leaves_the_engine_usable(make_sync, row, log):
    left = threading.Event()

    def interrupt_twice(worker):
        wait_until(lambda: "run" in log.read_text())
        os.kill(worker, signal.SIGSTOP)
        signal.pthread_kill(MAIN, signal.SIGINT)
        # The call ends what it had under way; the worker, which is stopped, keeps it waiting.
        wait_until(lambda: left.is_set() or is_in(concurrent.futures.wait))
        if not left.is_set():
            signal.pthread_kill(MAIN, signal.SIGINT)
        left.wait()
        os.kill(worker, signal.SIGCONT)

    with make_sync() as engine:
        worker = engine._engine.fleet.instances[0].pid
        thread = threading.Thread(target=interrupt_twice, args=(worker,))
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            engine.run([row(delay=300)])
        left.set()
        thread.join()
        assert len(engine.run([row()])) == 1


def test_an_engine_that_is_not_open_says_so(make_sync, row):
    engine = make_sync()
    with pytest.raises(RuntimeError, match="inside `with`"):
        engine.run([row()])
    with engine, pytest.raises(RuntimeError, match="open already"):
        engine.__enter__()


def test_a_stream_has_its_timings_though_its_last_group_is_dropped(make_sync, row):
    with make_sync(failure_policy="drop_group") as engine:
        stream = engine.stream([row(), row(delay=0.2, fail_times=9)])
        assert [group.index for group in stream] == [0]
        assert stream.progress.timings["timing/rollout/run_rollouts"] == 0.2
        assert stream.progress.groups_dropped == 1


def test_a_worker_that_dies_in_a_blocking_call_is_started_again(make_sync, row):
    with make_sync() as engine:
        assert len(engine.run([row(delay=0.1, die_times=1), row(delay=0.2)])) == 2


def test_a_dead_fleet_ends_a_blocking_call(make_sync, row):
    with make_sync(worker_restarts=0) as engine:
        with pytest.raises(RolloutStreamError, match="instance 'default' failed"):
            engine.run([row(delay=0.1, die_times=1)])

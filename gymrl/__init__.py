"""Reinforcement-learning rollouts of language models, without Ray."""

from gymrl._version import __version__

__all__ = ["__version__"]

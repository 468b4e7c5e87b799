"""Faces of gymrl for callers of other libraries: their names and parameters, gymrl behind them.

A face translates. It has no rules of its own: what it returns is what the engine, the scoring and
the tensors made.
"""

"""The driver: rows in, groups of trajectories out.

``prepare`` makes rows, ``merge`` joins the workers' streams, ``groups`` puts rows back together,
``engine`` runs it all, ``sync`` does so for code without an event loop.
"""

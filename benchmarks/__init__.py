"""How fast gymrl is, beside the frameworks it stands in for, on the machine at hand.

Each package in here is run by ``python -m benchmarks.NAME [--quick] [--json FILE]``; all of them by
``python -m benchmarks``.
"""

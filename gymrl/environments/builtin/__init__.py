"""Environments that come with gymrl.

===================================  ==============================================================
:mod:`.maths`                        answers checked by the math-verify package
:mod:`.reasoning_gym`                any dataset of the reasoning-gym package
:mod:`.number_guessing`              a game of several turns: higher, lower
:mod:`.sliding_puzzle`               a game of several turns: order the tiles
:mod:`.python_code`                  runs the Python that the model writes
===================================  ==============================================================

Each is imported by its module, so that nobody needs the packages of another.
"""

"""NeMo Gym, spoken over HTTP: client, servers of our own, and what its answers mean.

The road of one row: :mod:`~gymrl.gym.client` posts it to the agent's ``/run``,
:mod:`~gymrl.gym.schema` decodes the answer once, :mod:`~gymrl.gym.episode` makes the trajectory.
:mod:`~gymrl.gym.service` is the worker that does so for hundreds of rows at a time;
:mod:`~gymrl.gym.servers` and :mod:`~gymrl.gym.embedded` are the servers it may bring along.
"""

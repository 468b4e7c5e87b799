"""Where a sender of weights waits for the engines' workers."""

import socket
import threading
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore

from gymrl.errors import WeightUpdateError
from gymrl.generation.weight_transfer import broadcast, join, weight_sender


def test_a_sender_listens_on_the_interface_it_is_given_and_on_no_other():
    sender = weight_sender("gloo", host="127.0.0.1", timeout_s=20)
    try:
        place = sender.weights({"w": torch.arange(4.0)}).init_info
        with socket.create_connection(("127.0.0.1", place["port"]), timeout=5):
            pass
        # Another address of this machine, as those of its networks are.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", place["port"]), timeout=5)
        with pytest.raises(WeightUpdateError, match="can't listen on"):
            weight_sender("gloo", host="127.0.0.1", port=place["port"])
    finally:
        sender.close()


def test_a_worker_that_comes_there_gets_the_bytes():
    sender = weight_sender("gloo", host="127.0.0.1", timeout_s=20)
    state = {"w": torch.arange(4.0)}
    place = sender.weights(state).init_info
    received = torch.empty(16, dtype=torch.uint8)

    def worker():
        store = TCPStore("127.0.0.1", place["port"], timeout=timedelta(seconds=20))
        broadcast(join(store, 1, 2, 20), received)

    thread = threading.Thread(target=worker)
    thread.start()
    try:
        sender.send(state)
    finally:
        thread.join()
        sender.close()
    assert received.view(torch.float32).tolist() == [0, 1, 2, 3]

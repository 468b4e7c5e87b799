"""Addresses to listen on."""

from __future__ import annotations

import socket


def address_family(host: str) -> socket.AddressFamily:
    """IPv6 for an address with colons, IPv4 for any other."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that nobody listens on yet.

    Args:
        host: An address of this machine, or a name of one.
        port: 0 takes a free one.

    Raises:
        OSError: The address is not this machine's, or the port is taken.
    """
    bound = socket.socket(address_family(host), socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound

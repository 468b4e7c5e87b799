"""Mutual proof of a shared secret, before anything else of a peer is read.

::

    server -> client   magic (8) | nonce S (32)
    client -> server   nonce C (32) | HMAC(secret, "client" S C)
    server -> client   HMAC(secret, "server" S C)

HMAC-SHA256; every message has a fixed length. The roles in the text keep a proof from being sent
back to where it came from. The link after it is neither encrypted nor signed: it belongs on a
network that its users trust.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from typing import TYPE_CHECKING

from gymrl.errors import AuthenticationError, ConfigError, ProtocolError

if TYPE_CHECKING:
    import socket

_MAGIC = b"gymrl-A1"
_NONCE = 32
_PROOF = 32
MIN_SECRET = 16


def check_secret(secret: bytes) -> None:
    """Refuse secrets that could be guessed.

    Raises:
        ConfigError: It is not bytes, or shorter than 16 bytes.
    """
    if not isinstance(secret, bytes) or len(secret) < MIN_SECRET:
        raise ConfigError(
            f"secret: {MIN_SECRET} bytes at least are needed, such as secrets.token_bytes(32)",
            setting="secret",
        )


def _proof(secret: bytes, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(secret, _MAGIC + role + server_nonce + client_nonce, "sha256")


async def _receive(sock: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        try:
            part = await loop.sock_recv(sock, size - len(data))
        except OSError as error:
            raise AuthenticationError(
                f"the peer broke off while proving itself: {error}"
            ) from error
        if not part:
            raise AuthenticationError(
                "the peer closed the connection instead of proving that it knows the secret "
                "(do both sides have the same?)"
            )
        data += part
    return data


async def _send(sock: socket.socket, data: bytes) -> None:
    try:
        await asyncio.get_running_loop().sock_sendall(sock, data)
    except OSError as error:
        raise AuthenticationError(f"the peer broke off while proving itself: {error}") from error


async def prove_as_server(sock: socket.socket, secret: bytes) -> None:
    """Let the peer prove itself, then prove ourselves.

    Raises:
        AuthenticationError: The peer does not know the secret.
    """
    server_nonce = os.urandom(_NONCE)
    await _send(sock, _MAGIC + server_nonce)
    answer = await _receive(sock, _NONCE + _PROOF)
    client_nonce, proof = answer[:_NONCE], answer[_NONCE:]
    if not hmac.compare_digest(proof, _proof(secret, b"client", server_nonce, client_nonce)):
        raise AuthenticationError("a peer tried to connect without knowing the secret")
    await _send(sock, _proof(secret, b"server", server_nonce, client_nonce))


async def prove_as_client(sock: socket.socket, secret: bytes) -> None:
    """Prove ourselves, and let the server prove itself.

    Raises:
        AuthenticationError: The server does not know the secret, or refused ours.
        ProtocolError: It is no gymrl server.
    """
    greeting = await _receive(sock, len(_MAGIC) + _NONCE)
    if greeting[: len(_MAGIC)] != _MAGIC:
        raise ProtocolError("what answers there is no gymrl actor server")
    server_nonce, client_nonce = greeting[len(_MAGIC) :], os.urandom(_NONCE)
    await _send(sock, client_nonce + _proof(secret, b"client", server_nonce, client_nonce))
    answer = await _receive(sock, _PROOF)
    if not hmac.compare_digest(answer, _proof(secret, b"server", server_nonce, client_nonce)):
        raise AuthenticationError("the server does not know the secret")

"""The maths environment as a Gym server: rows bring ``expected_answer``, LaTeX or plain.

math-verify compares, in worker processes of its own
(:class:`gymrl.environments.builtin.maths.MathsEnvironment`), so that an answer it does not come back
from costs a worker and not the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from gymrl.config import require
from gymrl.environments.builtin.maths import MathsEnvironment
from gymrl.gym.embedded.base import Peers, RefusedRequest, ServerSettings
from gymrl.gym.embedded.resources import ResourcesServer, Verdict

if TYPE_CHECKING:
    from gymrl.gym.embedded.reply import Reply


class MathsSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings.

    Attributes:
        num_verifiers: Worker processes.
        seconds: For reading an answer, and again for comparing it.
    """

    num_verifiers: int = 1
    seconds: int = 5

    def __post_init__(self) -> None:
        for name in ("num_verifiers", "seconds"):
            require(getattr(self, name) > 0, name, getattr(self, name), "must be positive")


class MathsServer(ResourcesServer):
    """A right result is a reward of 1, anything else 0.

    A reply that the verifier did not come back from, or a reference that it cannot read, is refused
    (HTTP 422): it gets no 0.
    """

    Settings: ClassVar[type[ServerSettings]] = MathsSettings

    def __init__(self, instance: str, settings: Mapping[str, Any], peers: Peers) -> None:
        super().__init__(instance, settings, peers)
        self._environment = MathsEnvironment(
            num_workers=self.settings.num_verifiers, seconds=self.settings.seconds
        )

    async def open(self) -> None:
        """Start the verifiers."""
        await self._environment.__aenter__()

    async def close(self) -> None:
        """End them."""
        await self._environment.__aexit__(None, None, None)

    async def seed_session(self, row: dict[str, Any]) -> None:
        """Check the row.

        Raises:
            RefusedRequest: It has no ``expected_answer``.
        """
        _expected_answer(row)

    async def verify(self, row: dict[str, Any], reply: Reply, state: None) -> Verdict:
        """Compare the reply's result with the reference.

        Raises:
            RefusedRequest: They cannot be compared.
        """
        expected = _expected_answer(row)
        message = {"role": "assistant", "content": reply.text}
        step = await self._environment.step([[message]], [{"ground_truth": expected}])
        reward = step.rewards[0]
        if reward is None:
            raise RefusedRequest(
                f"the reply cannot be compared with the reference {expected!r}: that cannot be "
                "read, or the verifier did not come back"
            )
        found = step.answers[0] if step.answers is not None else None
        return Verdict(reward=float(reward), extras={"extracted_answer": found})


def _expected_answer(row: dict[str, Any]) -> str:
    expected = row.get("expected_answer")
    if isinstance(expected, bool) or not isinstance(expected, str | int | float) or expected == "":
        raise RefusedRequest(f"the row's expected_answer={expected!r} is no answer")
    return str(expected)

"""Rules that reward short answers within the attempts at one prompt.

Applied to training rollouts through Gym only, after effort shaping and penalties, to groups whose
rewards are all 0 or 1 and have no components. :mod:`.config` has the settings, :mod:`.lengths` what
is counted, :mod:`.rules` the arithmetic, :mod:`.profile` what a row says of its prompt, and
:mod:`.apply` puts them on the ledger.
"""

from gymrl.scoring.length_penalty.apply import (
    LengthOutcome,
    LengthReport,
    ScoringWarning,
    apply_length_penalty,
    env_reward,
)
from gymrl.scoring.length_penalty.config import (
    Band,
    BandDefaults,
    LengthPenaltyConfig,
    LengthRules,
    ProfileBandConfig,
)
from gymrl.scoring.length_penalty.lengths import Lengths, output_lengths

__all__ = [
    "Band",
    "BandDefaults",
    "LengthOutcome",
    "LengthPenaltyConfig",
    "LengthReport",
    "LengthRules",
    "Lengths",
    "ProfileBandConfig",
    "ScoringWarning",
    "apply_length_penalty",
    "env_reward",
    "output_lengths",
]

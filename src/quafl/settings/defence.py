"""[defence]: what the server does about clients that lie; see core.defence."""

from math import inf
from typing import Annotated, Literal

from pydantic import Field

from quafl.core.defence import Defence
from quafl.settings.base import Section


class DefenceSettings(Section):
    """None, unless it is asked for: the algorithms of the papers."""

    clip: Annotated[float, Field(ge=1)] = inf  # a displacement's norm over the usual one
    mean: Literal["mean", "trimmed", "geometric"] = "mean"  # of what came in a round
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.2  # of the values, at either end
    speeds: Annotated[float, Field(ge=0, lt=1)] = 0.0  # H_min is read at this share of the sorted speeds

    def build(self) -> Defence:
        """The defence."""
        return Defence(clip=self.clip, mean=self.mean, trim=self.trim, speeds=self.speeds)


class FederationDefence(DefenceSettings):
    """Real clients may lie: docs/results/attacks.md says what these bounds are worth."""

    clip: Annotated[float, Field(ge=1)] = 3.0
    speeds: Annotated[float, Field(ge=0, lt=1)] = 0.1

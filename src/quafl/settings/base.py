"""What all sections of a settings file share."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field


class SettingsError(Exception):
    """One sentence about what is wrong with the settings."""


def meant(name: str, known: Sequence[str]) -> str:
    """The beginning of what is said of a name that is not known: which one may have been meant."""
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


Raw: TypeAlias = dict[str, Any]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Tracker: TypeAlias = Literal["tensorboard", "mlflow", "wandb"]  # see run.tracking


class Section(BaseModel):
    """A table of the file: unknown keys and wrong types are errors, nothing is converted in silence."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

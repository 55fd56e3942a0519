# SPDX-License-Identifier: Apache-2.0
"""What all settings have in common: unknown keys forbidden, numbers are numbers, names that can be folders."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"  # becomes a folder name and a wildcard
Name = Annotated[str, Field(pattern=NAME)]


class Strict(BaseModel):
    """A section of the configuration."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

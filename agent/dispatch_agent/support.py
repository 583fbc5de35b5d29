"""Three-valued support: what is known about a capability, how, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Value = Literal["unknown", "yes", "no"]
Source = Literal["declared", "probed", "catalogue"]


@dataclass(frozen=True, slots=True)
class Support:
    """One answer. `reason` is shown to people wherever the answer is not yes."""

    value: Value = "unknown"
    source: Source = "declared"
    reason: str = ""

    def __bool__(self) -> bool:
        return self.value == "yes"

"""Time, passed in: the only module that reads a clock or sleeps."""

from __future__ import annotations

import threading
import time
from datetime import datetime, timezone
from typing import Protocol


class Clock(Protocol):
    """What the product needs of time. Wall time is only ever shown to people; order never rests on it."""

    def wall(self) -> str:
        """Now, as an ISO 8601 UTC text with microseconds."""
        ...

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back."""
        ...

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Sleep until `event` is set or `seconds` have passed; whether it is set."""
        ...


class SystemClock:
    """The machine's own clock."""

    def wall(self) -> str:
        return datetime.now(timezone.utc).isoformat(timespec="microseconds")

    def monotonic(self) -> float:
        return time.monotonic()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(max(0.0, seconds))

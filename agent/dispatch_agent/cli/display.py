"""What commands show: progress on a terminal, tables, sizes. Logs and prints never mix on one stream."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence

import click

from dispatch_agent.checkpoint import names
from dispatch_agent.clock import Clock

REFRESH = 0.2
"""Seconds between two updates of a progress line."""


def print_json(value: object) -> None:
    """For programs."""
    click.echo(json.dumps(value, indent=2))


def size(count: int) -> str:
    """Bytes for people: 1536 is '1.5 KiB'."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def shortened(text: str, most: int = 48) -> str:
    """At most `most` characters, the middle left out: names differ at their ends."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}…{text[len(text) - most // 2 :]}"


def shown_name(encoded: str) -> str:
    """A save's name, as records hold it, for people."""
    return names.shown(names.decode_name(encoded))


def printable(text: str) -> str:
    """What a record says, for a terminal: whoever may write to the store may have put control characters there."""
    return names.shown(text.encode("utf-8", "backslashreplace"))


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Columns wide enough for their longest cell."""
    everything = [header, *rows]
    widths = [max(len(row[column]) for row in everything) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in everything
    )


def progress(verb: str, clock: Clock) -> Callable[[str, int], Callable[[int], None]]:
    """For each save, what is called with the bytes that went by: draws on a terminal, does nothing elsewhere."""

    def of(save: str, total: int) -> Callable[[int], None]:
        if sys.stderr is None or not sys.stderr.isatty():
            return lambda _: None
        started, state, lock = clock.monotonic(), {"done": 0, "shown": 0.0}, threading.Lock()

        def tick(count: int) -> None:
            with lock:
                state["done"] += max(count, 0)
                now = clock.monotonic()
                finished = state["done"] >= total
                if now - state["shown"] < REFRESH and not finished:
                    return
                state["shown"] = now
                rate = state["done"] / max(now - started, 1e-3)
                share = 100 * state["done"] / total if total else 100
                line = f"\r{verb} {save}: {share:3.0f} % of {size(total)}, {size(int(rate))}/s\x1b[K"
                click.echo(line, err=True, nl=finished)

        return tick

    return of

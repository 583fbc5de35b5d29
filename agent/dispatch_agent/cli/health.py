"""`dispatch-agent health`: ask the watch beside us. Without click: a probe runs it every few seconds."""

from __future__ import annotations

import os
from typing import NoReturn

from dispatch_agent.errors import SettingsError
from dispatch_agent.health.ask import PATHS, ask

VARIABLE = "PUBLISH_LISTEN"


def is_plain(words: list[str]) -> bool:
    """Whether a command line says no more than what to ask, so that it needs no parser."""
    return not words or (len(words) == 1 and words[0] in PATHS)


def answer(question: str = "live", listen: str | None = None) -> NoReturn:
    """Print the watch's sentence and end: with 0 for yes, 1 for no."""
    try:
        code, sentence = _asked(question, listen or os.environ.get(VARIABLE))
    except SettingsError as error:
        code, sentence = error.exit_code, f"dispatch-agent: {error}"
    try:
        os.write(2 if code == SettingsError.exit_code else 1, f"{sentence}\n".encode("utf-8", "backslashreplace"))
    finally:  # nobody hears it, or a disk is full: the exit code is the answer
        os._exit(code)


def _asked(question: str, listen: str | None) -> tuple[int, str]:
    if not listen:
        sentence = f"nothing was asked: no watch here listens; give --listen, or set {VARIABLE} as for the watch"
        if question in {"started", "ready"}:
            raise SettingsError(sentence)
        return 0, sentence
    try:
        yes, sentence = ask(listen, question)
    except OSError as error:
        yes, sentence = False, f"no watch answers on {listen}: {error.strerror or error}"
    # A preStop hook that fails is an event that tells nobody anything: the watch then takes the whole grace period.
    return 0 if yes or question == "terminating" else 1, sentence

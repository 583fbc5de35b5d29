"""Who an execution is: its epoch, its attempt token, and the job it belongs to.

Pure: nothing here reads the environment, a clock or randomness. An epoch orders the executions of a job and fits an
unsigned 64-bit integer, but neither a signed one nor a JSON number: in JSON it is a decimal string, in object names
20 digits. An attempt token is opaque: compare it, never parse it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dispatch_agent.errors import InvalidEpoch, Refused

MAX_GENERATION = 18_000_000
MIN_SUBMISSION = 1
MAX_SUBMISSION = 999_999
MAX_RESTART = 999_999
MAX_EPOCH = MAX_GENERATION * 10**12 + MAX_SUBMISSION * 10**6 + MAX_RESTART

# `exec/<attempt>/` and `data/<epoch>-<attempt>/` are one file name each, of at most 255 bytes on every filesystem in
# use. 199 leaves room for the 20 digits, the dash and a temporary suffix, and is cheap to test in the POSIX script.
MAX_ATTEMPT_LENGTH = 199

_ATTEMPT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_NUMBER = re.compile(r"0|[1-9][0-9]*", re.ASCII)

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_JOB_ID = re.compile(f"[0-7][{_CROCKFORD}]{{25}}", re.ASCII)
_TIME_BITS = 48
_RANDOM_BYTES = 10


def epoch(generation: int, submission: int, restart: int) -> int:
    """The epoch `G * 10**12 + N * 10**6 + R`.

    Raises InvalidEpoch unless 0 <= generation <= 18,000,000, 1 <= submission <= 999,999 and 0 <= restart <= 999,999.
    """
    for name, value, least, greatest in (
        ("generation", generation, 0, MAX_GENERATION),
        ("submission", submission, MIN_SUBMISSION, MAX_SUBMISSION),
        ("restart count", restart, 0, MAX_RESTART),
    ):
        if not least <= value <= greatest:
            message = f"{name} {value} is out of range: an epoch needs one from {least} to {greatest}"
            raise InvalidEpoch(message)
    return generation * 10**12 + submission * 10**6 + restart


def split_epoch(value: int) -> tuple[int, int, int]:
    """The generation, submission and restart count of an epoch. Raises InvalidEpoch if one is out of its range."""
    generation, rest = divmod(value, 10**12)
    submission, restart = divmod(rest, 10**6)
    epoch(generation, submission, restart)
    return generation, submission, restart


def parse_epoch(text: str) -> int:
    """An epoch from decimal text: ASCII digits only, without sign, space or leading zero.

    Strict, so that one epoch has one text. Raises InvalidEpoch.
    """
    # The length is looked at first: int() refuses texts of thousands of digits with an error of its own.
    if len(text) > len(str(MAX_EPOCH)) or not _NUMBER.fullmatch(text):
        message = f"epoch {text!r} is not a plain decimal number up to {MAX_EPOCH}: give it as DISPATCH_EPOCH has it"
        raise InvalidEpoch(message)
    value = int(text)
    split_epoch(value)
    return value


def format_epoch(value: int) -> str:
    """An epoch as the 20 digits of an object name, so that name order is epoch order. Raises InvalidEpoch."""
    split_epoch(value)
    return f"{value:020d}"


def parse_job_id(text: str) -> str:
    """A job id: a ULID of 26 upper-case Crockford base32 characters. Returns it unchanged; raises Refused.

    Lower case is refused although ULIDs decode without regard to case: job ids are compared and become store names
    as text, so two spellings of one job would be two jobs.
    """
    if not _JOB_ID.fullmatch(text):
        hint = f"write it in upper case, {text.upper()}" if _JOB_ID.fullmatch(text.upper()) else "copy DISPATCH_JOB_ID"
        message = f"job id {text!r} is not a ULID (26 characters of {_CROCKFORD}, the first from 0 to 7): {hint}"
        raise Refused(message)
    return text


def new_job_id(time_ms: int, randomness: bytes) -> str:
    """A job id from Unix time in milliseconds and 10 random bytes. Ids sort by their time. Raises Refused."""
    if not 0 <= time_ms < 1 << _TIME_BITS or len(randomness) != _RANDOM_BYTES:
        message = (
            f"no job id from time {time_ms} ms and {len(randomness)} random bytes: "
            f"the time must fit {_TIME_BITS} bits and the bytes be {_RANDOM_BYTES}"
        )
        raise Refused(message)
    number = time_ms << 8 * _RANDOM_BYTES | int.from_bytes(randomness, "big")
    return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))


def parse_attempt(text: str) -> str:
    """An attempt token, checked to be one safe folder name. Returns it unchanged; raises Refused."""
    if len(text) > MAX_ATTEMPT_LENGTH or not _ATTEMPT.fullmatch(text):
        message = (
            f"attempt {text!r} is not a folder name: use letters, digits, dot, dash and underscore, "
            f"a letter or digit first, {MAX_ATTEMPT_LENGTH} at most"
        )
        raise Refused(message)
    return text


def memory_slurm_attempt(submission: int, slurm_job_id: int, restart: int) -> str:
    """The token of the simulated Slurm shape: `<N>.<Slurm job id>.<restart>`."""
    return f"{submission}.{slurm_job_id}.{restart}"


def memory_kubeflow_attempt(submission: int, execution: int, restart: int) -> str:
    """The token of the simulated Kubeflow shape: `<N>.a<execution>.r<restart>`."""
    return f"{submission}.a{execution}.r{restart}"


@dataclass(frozen=True, slots=True)
class Identity:
    """One execution. `source` says which inputs gave it: "kubeflow", "slurm" or "ready-made"."""

    job_id: str | None
    epoch: int
    attempt: str
    source: str

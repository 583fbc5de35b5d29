"""Every way this product says no: one class, one exit code, one sentence.

The sentence says what failed, the value seen and what to do. The tree:

    AgentError                      1   unexpected
      UsageError                    2   the command line itself
      SettingsError                 3   a setting is missing, wrong or contradicts another
      StoreError
        StoreUnavailable           10   may pass by itself: retried
        StoreDenied                11   credentials or permissions
        StoreTooWeak               12   the store cannot refuse a lost race
      SaveError
        Incomplete                 20   not finished by its completion rule
        SourceChanged              21   it changed or vanished while it was read
        IntegrityError             22   bytes and record disagree, or bytes cannot be read
          NewerFormat              22   a record of a later version of this product
          NotStored                22   what was just sent is not what stands there: sent again
      CommitError
        Fenced                     30   a newer execution has published
        EpochCollision             31   the same epoch under another attempt
        Conflict                   32   one name, two contents
        OutcomeUnknown             33   a write whose answer was lost could not be read back
      DrainTimeout                 40   something complete was left unpublished at the end
      NothingPublished             41   saves were seen and none was published
      Refused                     125   no valid identity (the prologue's contract)
        InvalidEpoch              125

126 and 127 are the entry agent's: the command was found but not executable, or not found.
"""

from __future__ import annotations


class AgentError(Exception):
    """Base of all. `exit_code` is an interface; `retryable` says whether trying again unchanged can help."""

    exit_code = 1
    retryable = False


class UsageError(AgentError):
    exit_code = 2


class SettingsError(AgentError):
    exit_code = 3


class StoreError(AgentError):
    """Something about the destination."""

    exit_code = 10


class StoreUnavailable(StoreError):
    exit_code = 10
    retryable = True


class StoreDenied(StoreError):
    exit_code = 11


class StoreTooWeak(StoreError):
    exit_code = 12


class SaveError(AgentError):
    """Something about one save."""

    exit_code = 20


class Incomplete(SaveError):
    exit_code = 20


class SourceChanged(SaveError):
    exit_code = 21
    retryable = True


class IntegrityError(SaveError):
    exit_code = 22


class NewerFormat(IntegrityError):
    """Not damaged, only beyond this version: readers refuse it, and never take an older save for the newest."""


class NotStored(IntegrityError):
    """The store holds other bytes than were sent a moment ago. Nothing names them yet."""

    retryable = True


class CommitError(AgentError):
    """Something about order among writers."""

    exit_code = 33


class Fenced(CommitError):
    exit_code = 30


class EpochCollision(CommitError):
    exit_code = 31


class Conflict(CommitError):
    exit_code = 32


class OutcomeUnknown(CommitError):
    exit_code = 33
    retryable = True


class DrainTimeout(AgentError):
    exit_code = 40


class NothingPublished(AgentError):
    exit_code = 41


class Refused(AgentError):
    exit_code = 125


class InvalidEpoch(Refused, ValueError):
    """An epoch or one of its parts is outside its range."""

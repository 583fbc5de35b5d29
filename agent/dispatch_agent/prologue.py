"""The entry agent: gives an execution its identity, then becomes the user's command.

One standalone file, the twin of `prologue/prologue.sh`: same rules, order and messages, held to the same vectors.
Run it as `/abs/python3 -I -S FILE COMMAND ARGUMENT...`. It imports only what is built into the interpreter (`posix` for
`os`, `_signal` for `signal`), and its values are a tuple and an exception, since importing `dataclasses` or `typing`
costs more time than everything this file does.

Two things it does beyond the script: it keeps environment entries that are no shell names, and when it resolves raw
counters and PUBLISH_ROOT is set, it marks the rank as started, so that a second run under one identity is refused.
"""

import posix
import sys
from _signal import SIG_DFL, SIGPIPE, SIGXFSZ, signal  # type: ignore[import-not-found]  # typeshed lacks it; see above

TYPE_CHECKING = False  # what type checkers know by this name; importing typing for it would double the start-up
if TYPE_CHECKING:
    from typing import NoReturn, TextIO

# The script is `sh` and takes its default from there; these are dash's and bash's folders.
_DEFAULT_PATH = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DIGITS = b"0123456789"
_TOKEN_CHARACTERS = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz._-"
_INPUTS = (
    b"DISPATCH_K8S_ADMISSION",
    b"DISPATCH_K8S_RESTART",
    b"DISPATCH_K8S_EPOCH_PREFIX",
    b"DISPATCH_K8S_TOKEN_PREFIX",
)
_WORKDIR = b"DISPATCH_K8S_WORKDIR"
_UNSET = b"(unset)"
_KEPT = b"_AGENT_KEPT_"  # the self-contained tree's launcher: what its own loader must not see, and the command must
_TRUE = {b"1", b"true", b"t", b"yes", b"y", b"on"}  # as click has it for every other switch
_HELD = 243  # a descriptor that no script has names for, as it has for 3 to 9, 200 and 255
_EACCES, _ENOENT, _ENOEXEC, _ENOTDIR = 13, 2, 8, 20


def resolve(environ: dict[bytes, bytes]) -> "Launch":
    """The identity that an environment gives, and the environment to hand on. Pure. Raises Refusal.

    First row that applies: Kubeflow's inputs, Slurm's, a finished pair. A pair beside raw inputs must agree with them.
    """
    given_epoch, given_attempt = environ.get(b"DISPATCH_EPOCH"), environ.get(b"DISPATCH_ATTEMPT")
    if (given_epoch is None) != (given_attempt is None):
        raise Refusal(
            b"half a pair: DISPATCH_EPOCH is %b, DISPATCH_ATTEMPT is %b; set both or neither"
            % (environ.get(b"DISPATCH_EPOCH", _UNSET), environ.get(b"DISPATCH_ATTEMPT", _UNSET))
        )
    if any(name in environ for name in _INPUTS):
        source = "kubeflow"
        epoch, attempt = _kubeflow(environ)
    elif b"SLURM_JOB_ID" in environ and b"DISPATCH_SUBMISSION" in environ:
        source = "slurm"
        epoch, attempt = _slurm(environ)
    elif given_epoch is not None and given_attempt is not None:
        source = "ready-made"
        epoch, attempt = given_epoch, given_attempt
    elif b"SLURM_JOB_ID" in environ:
        raise Refusal(
            b"submission missing: SLURM_JOB_ID is %b but DISPATCH_SUBMISSION is unset; "
            b"set it to the number of this submission, 1 for the first" % environ[b"SLURM_JOB_ID"]
        )
    else:
        message = (
            b"no identity: neither the counters of a cluster nor a finished pair is set; "
            b"set DISPATCH_EPOCH and DISPATCH_ATTEMPT, or under Slurm DISPATCH_SUBMISSION"
        )
        raise Refusal(message)
    _check_epoch(epoch)
    _check_attempt(attempt)
    if given_epoch is not None and (given_epoch, given_attempt) != (epoch, attempt):
        raise Refusal(
            b"the cluster contradicts the pair: DISPATCH_EPOCH is %b and DISPATCH_ATTEMPT is %b, but the counters give "
            b"%b and %b; unset the pair if this is a new execution"
            % (given_epoch, given_attempt or b"", epoch, attempt)
        )
    handed_on = {name: value for name, value in environ.items() if name not in _INPUTS and name != _WORKDIR}
    handed_on[b"DISPATCH_EPOCH"] = epoch
    handed_on[b"DISPATCH_ATTEMPT"] = attempt
    return Launch((epoch, attempt, source, handed_on))


def _kubeflow(environ: dict[bytes, bytes]) -> tuple[bytes, bytes]:
    admission, restart = environ.get(b"DISPATCH_K8S_ADMISSION", b""), environ.get(b"DISPATCH_K8S_RESTART", b"")
    if not (_is_number(admission) and _is_number(restart)):
        raise Refusal(
            b"admission or restart count missing or not a number: DISPATCH_K8S_ADMISSION is %b, "
            b"DISPATCH_K8S_RESTART is %b; look at the annotation and the label of the pod that they come from"
            % (environ.get(b"DISPATCH_K8S_ADMISSION", _UNSET), environ.get(b"DISPATCH_K8S_RESTART", _UNSET))
        )
    if len(admission) > 6 or len(restart) > 6:
        raise _refusal_of_bound(b"%b + %b" % (admission, restart))
    count = int(admission) + int(restart)
    if count > 999_999:
        raise _refusal_of_bound(b"%d" % count)
    prefix, token = environ.get(b"DISPATCH_K8S_EPOCH_PREFIX", b""), environ.get(b"DISPATCH_K8S_TOKEN_PREFIX", b"")
    return b"%b%06d" % (prefix, count), b"%b.%b.%b" % (token, admission, restart)


def _slurm(environ: dict[bytes, bytes]) -> tuple[bytes, bytes]:
    job_id, submission = environ[b"SLURM_JOB_ID"], environ[b"DISPATCH_SUBMISSION"]
    generation, restart = environ.get(b"AGENT_GENERATION", b"0"), environ.get(b"SLURM_RESTART_COUNT", b"0")
    if not _is_number(job_id) or job_id == b"0" or len(job_id) > 10:
        raise Refusal(b"job id of Slurm missing or not a number: SLURM_JOB_ID is %b; unset it outside Slurm" % job_id)
    if not _is_number(submission) or submission == b"0" or len(submission) > 6:
        raise Refusal(b"submission missing or not a number from 1 to 999999: DISPATCH_SUBMISSION is %b" % submission)
    if not _is_number(generation) or len(generation) > 8:
        raise Refusal(
            b"generation missing or not a number from 0 to 18000000: AGENT_GENERATION is %b; "
            b"unset it for a job that supersedes none" % generation
        )
    if not _is_number(restart):
        raise Refusal(
            b"restart count missing or not a number: SLURM_RESTART_COUNT is %b; "
            b"Slurm leaves it unset on the first run" % restart
        )
    if len(restart) > 6:
        raise _refusal_of_bound(restart)
    epoch = int(generation) * 10**12 + int(submission) * 10**6 + int(restart)
    return b"%d" % epoch, b"%b.%b.%b" % (submission, job_id, restart)


def _is_number(text: bytes) -> bool:
    """Whether it is decimal digits without a leading zero; bytes, since `str.isdigit` takes other scripts' digits."""
    return text == b"0" or (text != b"" and text[:1] != b"0" and not text.strip(_DIGITS))


def _check_epoch(epoch: bytes) -> None:
    if _is_number(epoch) and 7 <= len(epoch) <= 20:
        generation, rest = divmod(int(epoch), 10**12)
        if generation <= 18_000_000 and rest >= 10**6:
            return
    raise Refusal(
        b"epoch or epoch prefix missing or not a number within its bounds: the epoch is %b; it is a generation "
        b"from 0 to 18000000, a submission from 1 to 999999 and a restart count from 0 to 999999, joined, the last two "
        b"of six digits: 1000000 is submission 1, restart 0" % epoch
    )


def _check_attempt(attempt: bytes) -> None:
    if attempt and attempt[0] not in b"._-" and not attempt.strip(_TOKEN_CHARACTERS) and len(attempt) <= 199:
        return
    raise Refusal(
        b"attempt or token prefix missing or not a folder name: the attempt is %b; use letters, digits, dot, dash "
        b"and underscore, a letter or digit first, 199 at most" % attempt
    )


def _refusal_of_bound(count: bytes) -> "Refusal":
    return Refusal(
        b"restart count reached the epoch bound: %b; it must stay below 1000000, so start a new submission" % count
    )


def main(argv: list[str]) -> "NoReturn":
    """`dispatch-agent exec`: become the command that `argv` names, after `--allow-rank-restart`, `--hold` and `--`.

    `argv` must be the end of this process's own command line, since its bytes are read from there. Exits 125 when
    refused, 126 when the command cannot be run, 127 when it is not found.
    """
    words = list(argv)
    given = []
    while words[:1] in (["--allow-rank-restart"], ["--hold"]):
        given.append(words.pop(0))
    if words[:1] == ["--"]:
        del words[0]
    _become(_bytes_of(words), "--allow-rank-restart" in given, "--hold" in given)


def _become(command: list[bytes], allow_restart: bool, hold: bool) -> "NoReturn":
    environ = read_environ()
    try:
        _enter(environ.get(_WORKDIR, b""))
        launch = resolve(environ)
        if not command or command[0][:1] in {b"", b"-"}:
            message = b"no command, or one that starts with -: give a program and its arguments"
            raise Refusal(message)
        marker = b""
        raw = b"DISPATCH_EPOCH" not in environ
        hold = hold or (raw and environ.get(b"AGENT_HOLD", b"").lower() in _TRUE)
        if raw and environ.get(b"PUBLISH_ROOT"):
            allow_restart = allow_restart or environ.get(b"AGENT_ALLOW_RANK_RESTART", b"").lower() in _TRUE
            marker = _mark_started(environ, launch, allow_restart, hold)
        elif hold:
            message = b"nothing to hold: --hold needs PUBLISH_ROOT, and counters instead of a finished pair"
            raise Refusal(message)
    except Refusal as refusal:
        _say(refusal.message)
        raise SystemExit(125) from None
    _flush(sys.stdout)
    _flush(sys.stderr)
    error = _execute(command, launch.environ)
    if marker:
        _remove(marker)  # nothing ran
    _say(b"cannot run %b: %b" % (command[0], _reason(error)))
    raise SystemExit(127 if error.errno in {_ENOENT, _ENOTDIR} else 126)


def _flush(stream: "TextIO | None") -> None:
    """Write what is still buffered: it would be lost with this program."""
    try:
        if stream is not None:  # it was closed before start
            stream.flush()
    except (OSError, ValueError):  # the disk is full, or somebody closed it since: the command must run all the same
        return


def _enter(workdir: bytes) -> None:
    """Like `cd -P`: a relative folder counts from the image's own, whatever CDPATH says and however it is named."""
    if not workdir:
        return
    try:
        posix.chdir(workdir if workdir[:1] == b"/" else b"./" + workdir)
    except OSError as error:
        raise Refusal(b"cannot enter %b: %b" % (workdir, _reason(error))) from None


def _mark_started(environ: dict[bytes, bytes], launch: "Launch", allow_restart: bool, hold: bool) -> bytes:
    """Record that this rank ran under this identity; O_EXCL tells a second run from the first.

    Returns the marker's path if it goes where nothing could be run: not if it was there, nor if it is held.
    """
    name = b"SLURM_PROCID" if launch.source == "slurm" else b"JOB_COMPLETION_INDEX"
    rank = environ.get(name, b"0")
    if not _is_number(rank):
        raise Refusal(b"rank not a number: %b is %b; unset it for a job of one rank" % (name, rank))
    folder = environ[b"PUBLISH_ROOT"]
    try:
        for part in b"", b"exec", launch.attempt, b".dispatch":
            folder = folder + b"/" + part if part else folder
            try:
                posix.mkdir(folder)
            except FileExistsError:
                continue
        marker = b"%b/started.%b" % (folder, rank)
        try:
            descriptor = posix.open(marker, posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_CLOEXEC, 0o666)
        except FileExistsError:
            if not allow_restart:
                raise Refusal(
                    b"rank %b already ran under attempt %b: %b is there, so the counters repeated, or another "
                    b"execution's folder was copied; start a new execution, or weaken the identity with "
                    b"--allow-rank-restart" % (rank, launch.attempt, marker)
                ) from None
            _say(
                b"identity weakened: rank %b runs again under attempt %b, as it was allowed to" % (rank, launch.attempt)
            )
            if not hold:
                return b""
            descriptor = posix.open(marker, posix.O_WRONLY | posix.O_CLOEXEC)
        if hold:
            return _hold(descriptor)
        posix.close(descriptor)
    except OSError as error:
        raise Refusal(
            b"cannot record the start below PUBLISH_ROOT %b: %b; make it writable, unset it, or leave --hold out"
            % (environ[b"PUBLISH_ROOT"], _reason(error))
        ) from None
    return marker


def _hold(marker: int) -> bytes:
    """Lock the marker for the life of this process, whatever program it is by then: however it ends, the lock goes."""
    number = _HELD
    try:
        while posix.fstat(number):
            number -= 1
    except OSError:  # this one is free
        posix.dup2(marker, number)
    posix.close(marker)
    posix.lockf(number, posix.F_TLOCK, 0)
    posix.write(number, b"held\n")
    return b""


def _remove(marker: bytes) -> None:
    try:
        posix.unlink(marker)
    except OSError:  # then the next run is refused, and says which file is in its way
        return


def _execute(command: list[bytes], environ: dict[bytes, bytes]) -> OSError:
    """Replace this process; returns only with the error that a shell would report."""
    # CPython ignored these two before any of our code ran, and exec would hand that on.
    signal(SIGPIPE, SIG_DFL)
    signal(SIGXFSZ, SIG_DFL)
    places = [b""] if b"/" in command[0] else environ.get(b"PATH", _DEFAULT_PATH).split(b":")
    found = OSError(_ENOENT, "not found")
    for place in places:
        path = command[0] if b"/" in command[0] else (place or b".") + b"/" + command[0]
        try:
            try:
                posix.execve(path, command, environ)
            except OSError as error:
                if error.errno != _ENOEXEC:
                    raise
                # A script without `#!`: every shell runs it, execve alone does not.
                posix.execve(b"/bin/sh", [b"/bin/sh", path, *command[1:]], environ)
        except OSError as error:
            if error.errno not in {_ENOENT, _ENOTDIR}:
                found = error
    return found


def read_environ(path: str = "/proc/self/environ") -> dict[bytes, bytes]:
    """The environment as the kernel gave it: without the LC_CTYPE that CPython adds, of duplicates the last.

    `os.environb` has both wrong (it keeps the first), so it is used only where /proc is missing.
    """
    data = _read(path)
    if data:
        entries = (entry.partition(b"=") for entry in data.split(b"\0"))
        return {name.removeprefix(_KEPT): value for name, separator, value in entries if separator and name}
    environ: dict[bytes, bytes] = {name.removeprefix(_KEPT): value for name, value in posix.environ.items()}
    if environ.get(b"LC_CTYPE") in {b"C.UTF-8", b"C.utf8", b"UTF-8"} and not environ.get(b"LC_ALL"):
        del environ[b"LC_CTYPE"]  # what PEP 538 adds in the C locale; asking for it oneself is the same to a program
    return environ


def _bytes_of(words: list[str]) -> list[bytes]:
    """The words as the kernel gave them: in some locales decoding them was not reversible."""
    line = _read("/proc/self/cmdline").split(b"\0")[:-1]
    if len(line) > len(words):
        return line[len(line) - len(words) :]
    return [word.encode(sys.getfilesystemencoding(), "surrogateescape") for word in words]


def _read(path: str) -> bytes:
    """A file of /proc, empty if it cannot be read."""
    try:
        descriptor = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return b""
    parts = []
    while part := posix.read(descriptor, 1 << 20):
        parts.append(part)
    posix.close(descriptor)
    return b"".join(parts)


def _reason(error: OSError) -> bytes:
    return str(error.strerror).encode()


def _say(message: bytes) -> None:
    """One line on stderr. Where nobody can read it, the exit code is what counts."""
    try:
        posix.write(2, b"dispatch: %b\n" % message)
    except OSError:
        return


class Refusal(Exception):
    """No valid identity; `message` is the script's sentence."""

    def __init__(self, message: bytes) -> None:
        super().__init__(message.decode(errors="backslashreplace"))
        self.message = message


class Launch(tuple[bytes, bytes, str, dict[bytes, bytes]]):
    """A resolved identity and the environment of the command. A tuple with names: frozen, and cheap to define."""

    __slots__ = ()

    @property
    def epoch(self) -> bytes:
        return self[0]

    @property
    def attempt(self) -> bytes:
        return self[1]

    @property
    def source(self) -> str:
        """Which inputs gave it: "kubeflow", "slurm" or "ready-made"."""
        return self[2]

    @property
    def environ(self) -> dict[bytes, bytes]:
        return self[3]


if __name__ == "__main__":
    _become(_bytes_of(sys.argv[1:]), allow_restart=False, hold=False)

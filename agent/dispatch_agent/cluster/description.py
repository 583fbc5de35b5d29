"""The job description that `dispatch-agent render` takes: parsed and checked, values only.

Every refusal is a SettingsError that names the key, the value that was seen and what to write instead. What holds only
for one kind of manifest (the limits of Trainer, of a Pod, of a batch script) is in `limits`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from dispatch_agent.errors import Refused, SettingsError
from dispatch_agent.identity import MAX_GENERATION, MAX_RESTART, MAX_SUBMISSION, parse_job_id
from dispatch_agent.settings import PREFIX

Check = Callable[[str], object]
"""Takes a setting's text; raises SettingsError with what is wrong with it."""

MAX_NODES = 100_000  # a rank has five digits in store names

_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)
_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+|)", re.ASCII)
_SCALE = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_SBATCH_OPTION = re.compile(r"[a-z][a-z0-9-]*", re.ASCII)

# What render says itself, and where the description says it.
_RENDERED_SETTINGS = {
    "root": "checkpoints.path says it",
    "grace": "the key grace says it",
    "shared_volume": "it follows from checkpoints.claim",
    "rank": "the cluster says it",
    "listen": "the probes ask at a fixed port",
    "allow_rank_restart": "the key allow_rank_restart says it",
    "once": "a sidecar must watch on",
    "done_file": "agent.sidecar says how it ends",
    "end_with_trainer": "agent.sidecar says how it ends",
    "termination_message": "its default is where Kubernetes looks",
    "json": "nobody reads it there",
}
# Of a batch script, likewise.
_RENDERED_SBATCH = frozenset({"job-name", "nodes", "requeue", "no-requeue", "signal", "open-mode"})


@dataclass(frozen=True, slots=True)
class Runtime:
    """The (Cluster)TrainingRuntime. `policy` "torch" lets Trainer set the PET_ variables that torchrun reads."""

    name: str
    scope: Literal["cluster", "namespace"]
    policy: Literal["torch", "plain"]


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoint root and its volume: an existing claim, or space that goes with the pod; of neither, None."""

    path: str
    claim: str | None
    size: str | None


@dataclass(frozen=True, slots=True)
class Credentials:
    """A secret for the containers that publish: its keys as variables, or as files below `mount`."""

    secret: str
    mount: str | None


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one container: quantities by resource name."""

    requests: Mapping[str, str]
    limits: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Agent:
    """Our own containers. `env` is for them alone; `install` puts the agent's programs into the trainer's container."""

    image: str | None
    sidecar: Literal["native", "plain"]
    install: bool
    resources: Resources
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Job:
    """A whole description. `publish` holds variables of `publish watch` and `publish init` by their names; seconds."""

    name: str
    namespace: str | None
    job_id: str
    submission: int
    generation: int
    attempt: int
    restart: int
    image: str | None
    command: tuple[str, ...]
    workdir: str | None
    nodes: int
    env: Mapping[str, str]
    resources: Resources
    user: int
    service_account: str | None
    queue: str | None
    runtime: Runtime
    checkpoints: Checkpoints
    dest: str
    publish: Mapping[str, str]
    credentials: Credentials | None
    grace: int
    max_restarts: int
    allow_rank_restart: bool
    agent: Agent
    sbatch: Mapping[str, str]

    @property
    def epoch_prefix(self) -> str:
        """What stands before the six digits of R in an epoch."""
        return str(self.generation * 10**6 + self.submission)

    @property
    def token_prefix(self) -> str:
        """What stands before A and J in an attempt token."""
        return f"{self.job_id}.{self.submission}.{self.attempt}"


def parse(document: object, settings: Mapping[str, Check], draw_job_id: Callable[[], str]) -> Job:
    """A job from what a YAML or JSON document holds. Raises SettingsError.

    `settings`: the options of `publish watch` and `publish init` by name, as in `drain_timeout`, each with its check.
    `draw_job_id` is called when the description has no `job_id`.
    """
    top = _Section("", document)
    name = top.text("name", required=True, form=_LABEL, what="lower-case letters, digits and dashes, 63 at most")
    publish = top.section("publish")
    job = Job(
        name=name,
        namespace=top.optional("namespace", _LABEL, "lower-case letters, digits and dashes, 63 at most"),
        job_id=_job_id(top, draw_job_id),
        submission=top.number("submission", 1, MAX_SUBMISSION, 1),
        generation=top.number("generation", 0, MAX_GENERATION, 0),
        attempt=top.number("attempt", 1, 999_999, 1),
        restart=top.number("restart", 0, MAX_RESTART - 1, 0),
        image=_image(top, "image"),
        command=_command(top),
        workdir=_folder(top, "workdir", None),
        nodes=top.number("nodes", 1, MAX_NODES, 1),
        env=_variables(top, "env"),
        resources=_resources(top, "resources"),
        user=top.number("user", 1, 2**31 - 1, 65532, ": pods are within Pod Security restricted, where none is root"),
        service_account=top.optional("service_account", _NAME, _NAME_RULE),
        queue=top.optional("queue", _LABEL, "a LocalQueue's name, 63 characters at most"),
        runtime=_runtime(top.section("runtime"), name),
        checkpoints=_checkpoints(top.section("checkpoints")),
        dest=publish.text("dest", required=True),
        publish=_settings(publish, settings),
        credentials=_credentials(top.section("credentials")),
        grace=top.number("grace", 1, 7 * 86_400, 300),
        max_restarts=top.number("max_restarts", 0, MAX_RESTART - 1, 3),
        allow_rank_restart=top.flag("allow_rank_restart"),
        agent=_agent(top.section("agent")),
        sbatch=_sbatch(top.section("sbatch")),
    )
    top.refuse_the_rest()
    return job


def quantity(text: str) -> float:
    """A Kubernetes quantity as a number. Raises ValueError."""
    match = _QUANTITY.fullmatch(text)
    if not match:
        raise ValueError(text)
    number, suffix = float(match[1]), match[2]
    if suffix.endswith("i"):
        return number * 1024.0 ** ("KMGTPE".index(suffix[0]) + 1)
    return number * (_SCALE[suffix] if suffix in _SCALE else float(f"1{suffix}"))


_NAME_RULE = "lower-case letters, digits, dashes and dots, 253 at most"


class _Section:
    """One mapping of the description. What nobody asked for in the end is an unknown key."""

    def __init__(self, place: str, value: object) -> None:
        if not isinstance(value, Mapping):
            where = place.rstrip(".") or "the description"
            refuse(where, value, "write a mapping of keys to values")
        self.place = place
        self.values: Mapping[Any, Any] = value
        self.asked: dict[str, None] = {}

    def get(self, key: str) -> Any:
        self.asked[key] = None
        return self.values.get(key)

    def key(self, key: str) -> str:
        return self.place + key

    def section(self, key: str) -> _Section:
        value = self.get(key)
        return _Section(f"{self.place}{key}.", {} if value is None else value)

    def text(self, key: str, *, required: bool = False, form: re.Pattern[str] | None = None, what: str = "") -> str:
        value = self.get(key)
        if value is None and not required:
            return ""
        if value is None:
            message = f"{self.key(key)} is missing: {what or 'it has no default'}"
            raise SettingsError(message)
        if not isinstance(value, str):
            refuse(self.key(key), value, "write a text; quote what YAML takes for a number or a truth value")
        if not value or not _can_be_passed(value) or (form is not None and not form.fullmatch(value)):
            refuse(self.key(key), value, f"write {what or 'a text that is not empty'}")
        return value

    def optional(self, key: str, form: re.Pattern[str] | None = None, what: str = "") -> str | None:
        return self.text(key, form=form, what=what) or None

    def choice(self, key: str, *allowed: str) -> str:
        """The first is the default."""
        value = self.get(key)
        if value is None:
            return allowed[0]
        if value not in allowed:
            refuse(self.key(key), value, f"choose one of {', '.join(allowed)}")
        return str(value)

    def number(self, key: str, least: int, greatest: int, default: int, why: str = "") -> int:
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= greatest:
            refuse(self.key(key), value, f"write a whole number from {least} to {greatest}{why}")
        return int(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            refuse(self.key(key), value, "write true or false")
        return bool(value)

    def refuse_the_rest(self) -> None:
        for key in self.values:
            if key not in self.asked:
                refuse_unknown(self.key(str(key)), str(key), self.asked)


def refuse(key: str, value: object, remedy: str) -> NoReturn:
    """Raises SettingsError: the key, the value seen, what to do."""
    seen = repr(value)
    message = f"{key} is {seen if len(seen) <= 120 else seen[:117] + '...'}: {remedy}"
    raise SettingsError(message)


def refuse_unknown(place: str, key: str, known: Sequence[str] | Mapping[str, object]) -> NoReturn:
    close = difflib.get_close_matches(key, list(known), n=1)
    hint = f"did you mean {close[0]}?" if close else f"the keys there are {', '.join(sorted(known))}"
    message = f"{place} is no key of a job description: {hint}"
    raise SettingsError(message)


def _can_be_passed(text: str) -> bool:
    """Whether a program can get it: no NUL, and nothing that JSON can write and UTF-8 cannot."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _job_id(top: _Section, draw: Callable[[], str]) -> str:
    text = top.text("job_id")
    try:
        return parse_job_id(text) if text else draw()
    except Refused as error:
        message = f"job_id: {error}; or leave it out, and one is drawn"
        raise SettingsError(message) from None


def _image(section: _Section, key: str) -> str | None:
    return section.optional(key, re.compile(r"\S{1,500}"), "an image's name, without spaces, 500 characters at most")


def _command(top: _Section) -> tuple[str, ...]:
    words = top.get("command")
    if words is None:
        message = "command is missing: write a list of the program and its arguments"
        raise SettingsError(message)
    if not isinstance(words, list) or not words:
        refuse("command", words, "write a list of the program and its arguments")
    for number, word in enumerate(words):
        if not isinstance(word, str) or not _can_be_passed(word):
            refuse(f"command[{number}]", word, "write a text; quote what YAML takes for a number or a truth value")
    if words[0] == "" or words[0].startswith("-"):
        refuse("command[0]", words[0], "name a program; the prologue refuses what is empty or starts with a dash")
    return tuple(words)


def _folder(section: _Section, key: str, default: str | None) -> str | None:
    value = section.optional(key) or default
    if value is None:
        return None
    parts = value.split("/")[1:]
    if (
        not value.startswith("/")
        or parts == [""]
        or {"", ".", ".."} & set(parts)
        or ":" in value
        or not value.isprintable()
    ):
        refuse(section.key(key), value, "write an absolute path, such as /checkpoints, without a colon, // or ..")
    return value


def _variables(section: _Section, key: str) -> dict[str, str]:
    found = {}
    given = section.section(key)
    for name in given.values:
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            refuse(f"{section.key(key)}, the name", name, "write letters, digits and underscores, no digit first")
        found[name] = _value(given.key(name), given.get(name))
    return dict(sorted(found.items()))


def _value(key: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or not _can_be_passed(str(value)):
        refuse(key, value, "write a text or a whole number; quote everything else")
    return str(value)


def _resources(section: _Section, key: str, default: Resources | None = None) -> Resources:
    given = section.section(key)
    found = Resources(_quantities(given, "requests"), _quantities(given, "limits"))
    given.refuse_the_rest()
    for name, request in found.requests.items():
        if quantity(request) > quantity(found.limits.get(name, request)):
            refuse(given.key(f"requests.{name}"), request, f"ask for no more than the limit, {found.limits[name]}")
        if "/" in name and found.limits.get(name) != request:
            refuse(given.key(f"requests.{name}"), request, "give the same number under limits: devices are not shared")
    return default if default and not (found.requests or found.limits) else found


def _quantities(section: _Section, key: str) -> dict[str, str]:
    found = {}
    given = section.section(key)
    for name in given.values:
        place = given.key(str(name))
        if name not in {"cpu", "memory", "ephemeral-storage"} and not re.fullmatch(
            r"hugepages-\w+|[a-z0-9.-]+/[A-Za-z0-9._-]+", str(name)
        ):
            refuse(
                f"{given.place.rstrip('.')}, the resource",
                name,
                "write cpu, memory, ephemeral-storage, hugepages-SIZE or a device such as nvidia.com/gpu",
            )
        text = _value(place, given.get(name))
        _check_quantity(place, text)
        if "/" in name and not text.isdecimal():
            refuse(place, text, "write a whole number of devices")
        found[str(name)] = text
    return found


def _check_quantity(key: str, text: str) -> None:
    """Raises SettingsError unless it is a Kubernetes quantity above 0."""
    try:
        positive = quantity(text) > 0
    except ValueError:
        positive = False
    if not positive:
        refuse(key, text, "write a quantity above 0, such as 500m, 2, 64Gi or 1.5e9")


def _runtime(section: _Section, job: str) -> Runtime:
    name = section.optional("name", _NAME, _NAME_RULE) or job
    scope = section.choice("scope", "namespace", "cluster")
    policy = section.get("policy")
    if policy in {"mpi", "flux", "torchtune"}:
        refuse(
            "runtime.policy",
            policy,
            "choose torch or plain: MPI starts its ranks past the prologue, Flux takes it apart, torchtune is not "
            "recognised behind it, so that their ranks would have no identity",
        )
    policy = section.choice("policy", "torch", "plain")
    section.refuse_the_rest()
    return Runtime(name, "cluster" if scope == "cluster" else "namespace", "torch" if policy == "torch" else "plain")


def _checkpoints(section: _Section) -> Checkpoints:
    claim = section.optional("claim", _NAME, _NAME_RULE)
    size = section.get("size")
    if size is not None:
        size = _value("checkpoints.size", size)
        _check_quantity("checkpoints.size", size)
    if claim and size:
        refuse("checkpoints.size", size, f"leave it out, or the claim {claim}: an existing claim has its own size")
    path = _folder(section, "path", "/checkpoints")
    section.refuse_the_rest()
    return Checkpoints(path or "/checkpoints", claim, size)


def _credentials(section: _Section) -> Credentials | None:
    secret = section.optional("secret", _NAME, _NAME_RULE)
    mount = _folder(section, "mount", None)
    section.refuse_the_rest()
    if secret is None and mount is not None:
        refuse("credentials.mount", mount, "name the secret too, under credentials.secret")
    return None if secret is None else Credentials(secret, mount)


def _settings(section: _Section, known: Mapping[str, Check]) -> dict[str, str]:
    """Variables by name, in the description's order."""
    found = {}
    for key in section.values:
        name = str(key).replace("-", "_")
        if name == "dest":
            continue
        if name in _RENDERED_SETTINGS:
            refuse(f"publish.{key}", section.values[key], f"leave it out: {_RENDERED_SETTINGS[name]}")
        if name not in known:
            refuse_unknown(f"publish.{key}", name, [*(set(known) - set(_RENDERED_SETTINGS)), "dest"])
        text = _setting(f"publish.{key}", section.get(key))
        try:
            known[name](text)
        except SettingsError as error:
            message = f"publish.{key} is {text!r}: {error}"
            raise SettingsError(message) from None
        found[PREFIX + name.upper()] = text
    return found


def _setting(key: str, value: object) -> str:
    """A setting's variable: a list of several values is one text with spaces between them."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, list):
        words = [_value(f"{key}[{number}]", word) for number, word in enumerate(value)]
        for number, word in enumerate(words):
            if not word or re.search(r"\s", word):
                refuse(f"{key}[{number}]", word, "write a value without spaces: its variable holds several, so divided")
        return " ".join(words)
    return str(value) if isinstance(value, float) else _value(key, value)


def _agent(section: _Section) -> Agent:
    sidecar = section.choice("sidecar", "native", "plain")
    small = {"cpu": "100m", "memory": "256Mi"}
    agent = Agent(
        image=_image(section, "image"),
        sidecar="plain" if sidecar == "plain" else "native",
        install=section.flag("install"),
        resources=_resources(section, "resources", Resources(small, {"memory": "512Mi"})),
        env=_variables(section, "env"),
    )
    section.refuse_the_rest()
    return agent


def _sbatch(section: _Section) -> dict[str, str]:
    """Options of sbatch by their long names; those without a value are "true" in the description, and here empty."""
    found = {}
    for key in section.values:
        name, value = str(key), section.get(key)
        if not _SBATCH_OPTION.fullmatch(name):
            refuse("sbatch, the option", key, "write an option's long name without the dashes, such as time")
        if name in _RENDERED_SBATCH:
            refuse(f"sbatch.{name}", value, "leave it out: render writes this option itself")
        text = "" if value is True else _value(f"sbatch.{name}", value)
        if re.search(r"[\s#]", text):
            refuse(f"sbatch.{name}", value, "write it without spaces and #, which end an #SBATCH line's value")
        found[name] = text
    return found

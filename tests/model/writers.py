"""Publishers as actors: who they are, what is asked of each of their steps, and of all of them at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.model import actors
from tests.model.actors import Folder, Save, shipped
from tests.model.explore import Actor, Judge, Marks, Step
from tests.model.invariants import View, i8_what_is_said_is_so
from tests.model.replay import Machine, Program
from tests.model.world import Objects, apply, below

from dispatch_agent.publish import keys, records

STALE, KNOWS, BEHIND = "stale", "knows the pointer", "left the pointer behind"
UNSURE = "sent a commit without an answer"
PENDING = "sent the pointer without an answer"
STOOD = "the newest commit was "
SAID = "published "
ENDED = "ended with "


@dataclass(frozen=True, slots=True)
class Writer:
    """A publisher on a folder. `number` is in its nonce."""

    folder: Folder
    number: int
    rank: int = 0

    @property
    def name(self) -> str:
        return f"w{self.number} (epoch {self.folder.epoch}, {self.folder.path})"


def publishers(
    writers: Sequence[Writer],
    saves: Mapping[Folder, Sequence[Save]],
    *,
    tries: int = 2,
    age: int = 1,
    weak: bool = False,
    alone: bool = True,
    trained: bool = False,
) -> tuple[tuple[Actor, ...], dict[str, bytes]]:
    """The actors, and what stands on their volumes. `alone`: nobody but them is in the scenario. `trained`: nothing
    stands there yet; a trainer for each folder writes the saves."""
    for folder in saves:
        actors.own(folder)
    stands = {} if trained else dict(save.at(folder) for folder, there in saves.items() for save in there)
    turns = {folder: len(there) if trained else 0 for folder, there in saves.items()}

    def publisher(writer: Writer) -> Actor:
        def program(start: int) -> Program:
            folder, number, rank = writer.folder, writer.number, writer.rank
            how: Any = {"rank": rank, "weak": weak, "tries": tries, "age": age, "turns": turns[folder]}
            return actors.publishing(folder, number, start, **how)

        asked = judge(writer, saves[writer.folder], weak=weak, age=age)
        return Actor(writer.name, program, asked, *_alone(writer, writers, data=alone, volume=not trained))

    def trainer(folder: Folder) -> Actor:
        def program(_start: int) -> Program:
            return actors.training(folder, saves[folder])

        return Actor(f"trainer of {folder.path}", program, lambda step: ("", step.marks), faultless=True)

    return (*map(publisher, writers), *(map(trainer, saves) if trained else ())), stands


def _alone(
    writer: Writer, writers: Sequence[Writer], *, data: bool, volume: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a writer shares with nobody, and what nobody else changes."""
    folder = writer.folder
    others = [other for other in writers if other is not writer]
    mine, reads = [], []
    if volume and all(other.folder != folder for other in others):
        mine.append(folder.local)
    if all(other.folder.epoch != folder.epoch for other in others):
        mine.append(keys.claims_prefix(folder.epoch))
        reads.append(f"{keys.COMMITS}/{folder.epoch:020d}")
    if data:
        # Data has keys of its own try, and only its writer and a prune ever look at them.
        mine.append(keys.DATA)
        reads.append(keys.PRUNED)
    return tuple(mine), tuple(reads)


def pruner(number: int = 1) -> Actor:
    """A prune that keeps two saves, started at any time."""
    return Actor(f"prune {number}", lambda _start: actors.pruning(), _of_prune)


def _of_prune(step: Step) -> tuple[str, Marks]:
    key, op = step.request.key, step.request.op
    if not step.request.writes or key == keys.POINTER:
        return _i4(step), step.marks
    wrong = ""
    if op == "delete" and not key.startswith(f"{keys.DATA}/"):
        wrong = f"I6: prune deletes {key}"
    if op != "delete" and not key.startswith(f"{keys.PRUNED}/"):
        wrong = f"I1: prune sends {op} {key}"
    return wrong, step.marks


def ran(actors_: Sequence[Actor], objects: Mapping[str, bytes]) -> dict[str, bytes]:
    """What is there when these have run to their end, one after the other, and nothing went wrong."""
    machine = Machine()
    there: Objects = objects
    with shipped():
        for actor in actors_:
            node = machine.start(actor.program(0))
            while (request := machine.nodes[node].request) is not None:
                answer, there = apply(there, request)
                node, _ = machine.after(node, answer)
    return dict(there)


def judge(writer: Writer, saves: Sequence[Save], *, weak: bool, age: int) -> Judge:
    """What every step of a publisher is asked."""

    def of_step(step: Step) -> tuple[str, Marks]:
        if step.request.local:
            marks = step.marks | ({f"{ENDED}{step.end}"} if step.end else set())
            return _at_its_end(step, writer, saves), marks
        wrong = (
            (_i1(step, writer, age) or _i4(step) or _i5(step, writer, weak=weak) or _stale(step))
            if step.request.writes
            else ""
        )
        wrong = wrong or (i8_what_is_said_is_so(step.said, step.after) if step.said else "")
        marks = _marks(step, writer) | ({f"{ENDED}{step.end}"} if step.end else set())
        return wrong or _at_its_end(step, writer, saves), marks

    return of_step


def _i1(step: Step, writer: Writer, age: int) -> str:
    """Its own nonce, its claims, the pointer; and no key of data twice."""
    key, request = step.request.key, step.request
    if key == keys.POINTER or key.startswith(keys.claims_prefix(writer.folder.epoch) + "/"):
        return ""
    nonce = actors.nonce(writer.number, step.start, 0, age)[:11]  # the last digit counts the starts within a start
    if not key.startswith(("data/", f"{keys.COMMITS}/")) or f".{nonce}" not in key:
        return f"I1: {writer.name} sends {request.op} {key}, which does not carry its nonce"
    if request.op == "delete":
        named = {part.prefix for record in step.after.commits.values() for part in record.parts}
        return f"I6: {key} is deleted and a commit names it" if any(key.startswith(n) for n in named) else ""
    there = step.before.objects.get(key)
    if there is not None and (there != request.data or (request.op == "put" and not key.endswith(".json"))):
        return f"I1: {key} is written a second time: two tries have one key"
    return ""


def _i4(step: Step) -> str:
    if step.request.key == keys.POINTER and step.request.op == "create" and KNOWS in step.marks:
        return "I4: the pointer vanished and was made anew by one who knew it"
    made_anew = step.answered and step.request.op == "create" and step.before.pointer is None
    if step.request.key == keys.POINTER and made_anew:
        made = step.after.pointer
        stood = max((mark for mark in step.marks if mark.startswith(STOOD)), default="")
        if made is not None and f"{STOOD}{made.order}" < stood:
            return f"I4: the pointer is made anew for {made.order}, and {stood} when it was looked for"
    return ""


def _i5(step: Step, writer: Writer, *, weak: bool) -> str:
    """Nothing is published under an epoch that is another attempt's."""
    if not step.request.key.startswith(("data/", f"{keys.COMMITS}/")):
        return ""
    folder = writer.folder
    key = keys.weak_attempt_claim_key(folder.epoch, folder.attempt) if weak else keys.attempt_claim_key(folder.epoch)
    owner = step.before.objects.get(key)
    if owner != folder.attempt.encode():
        return f"I5: {writer.name} writes {step.request.key}, and the epoch's claim says {owner!r}"
    return ""


def _stale(step: Step) -> str:
    if STALE in step.marks and step.request.key.startswith(f"{keys.COMMITS}/") and step.request.op != "delete":
        return f"stale: {step.request.key} is sent, whose manifest was written after a newer epoch had published"
    return ""


def _marks(step: Step, writer: Writer) -> Marks:
    key, marks = step.request.key, step.marks
    if key.startswith("data/") and key.endswith(".json") and step.request.op in {"create", "put"}:
        newer = step.before.epoch > writer.folder.epoch
        marks = (marks | {STALE}) if newer else (marks - {STALE})
    if key == keys.POINTER and step.answered:
        marks = frozenset(mark for mark in marks if not mark.startswith(STOOD))
        if step.after.pointer is not None and (step.request.op == "read" or step.before.pointer != step.after.pointer):
            marks |= {KNOWS}
        elif step.after.commits:
            marks |= {f"{STOOD}{max(step.after.commits)}"}
    marks |= {f"{SAID}{about}" for what, about in step.said if what == "published"}
    if key.startswith((f"{keys.COMMITS}/", f"{keys.PRUNED}/")) and not step.answered:
        marks |= {UNSURE}
    if key == keys.POINTER and step.request.writes and not step.answered:
        marks |= {PENDING}
    if any(what == "pointer" for what, _ in step.said):
        marks |= {BEHIND}
    return marks


def _at_its_end(step: Step, writer: Writer, saves: Sequence[Save]) -> str:
    if not step.end:
        return ""
    folder, view, end = writer.folder, step.after, step.end
    if end == "done":
        return _i9(view, folder, saves)
    if end == "Fenced":
        late = view.epoch > folder.epoch or keys.seal_key(folder.epoch) in view.objects
        return (
            "" if late or _succeeded(view, writer) else f"I9: {writer.name} was fenced, and nobody was there to do it"
        )
    reasons = {
        "EpochCollision": any(attempt != folder.attempt.encode() for attempt in _attempts(view, folder.epoch)),
        "OutcomeUnknown": UNSURE in step.marks,
        "StoreTooWeak": True,
        "Conflict": len(_terms(view, writer)) < len(_folders(view, writer)),
    }
    return "" if reasons.get(end) else f"I8: {writer.name} ended with {end}, and nobody gave it a reason"


def _attempts(view: View, epoch: int) -> list[bytes]:
    """What the claims of the epoch say whose it is."""
    prefix = f"{keys.claims_prefix(epoch)}/attempt."
    return [data for key, data in view.objects.items() if key.startswith(prefix)]


def _folders(view: View, writer: Writer) -> dict[str, int]:
    """The folders of the writer's rank and their terms."""
    terms: dict[str, int] = {}
    for key in below(view.objects, keys.claims_prefix(writer.folder.epoch)):
        parsed = keys.parse_folder_claim(key.rpartition("/")[2])
        if parsed and parsed[0] == writer.rank:
            terms[records.folder_of_claim(view.objects[key], key)] = parsed[1]
    return terms


def _terms(view: View, writer: Writer) -> set[int]:
    return set(_folders(view, writer).values())


def _succeeded(view: View, writer: Writer) -> bool:
    """Whether another folder of the same rank has a greater term."""
    return max(_terms(view, writer), default=0) > _folders(view, writer).get(writer.folder.id, 0)


def _i9(view: View, folder: Folder, saves: Sequence[Save]) -> str:
    """What stands at the end is committed, in one place; or its name's last commit has that content already."""
    for save in {save.name: save for save in saves}.values():
        of_name = [
            (order, record)
            for order, record in sorted(view.commits.items())
            if record.folder == folder.id and record.save == save.name
        ]
        places = {order.place for order, record in of_name if record.sequence == save.number}
        already = bool(of_name) and not places and view.holds(of_name[-1][1], save.content.encode())
        if len(places) != 1 and not already:
            return f"I9: {save.name} of {folder.path} is committed in {len(places)} places by the end"
    return ""


def finished(view: View, ends: tuple[str, ...], marks: tuple[Marks, ...]) -> str:
    """What must be so when every publisher has ended, and none said that it could not move the pointer."""
    if "done" not in ends or any(BEHIND in mark for mark in marks) or not view.commits:
        return ""
    newest = max(view.commits)
    if view.pointer is None or view.pointer.order.place != newest.place:
        return f"I4: all have ended, the newest commit is {newest}, and the pointer names {view.pointer}"
    return ""


def nothing_said_is_swept(view: View, marks: tuple[Marks, ...]) -> str:
    """What is published stays until a prune says by a tombstone that it goes."""
    for mark in frozenset().union(*marks):
        order = keys.parse_commit_key(mark.removeprefix(SAID))
        if order is not None and view.swept(order):
            return f"I6: {mark}, and then it was swept"
    return ""

"""A trainer that does what its arguments say, one after the other; it needs nothing but Python and the entry agent.

save=NAME:FILES:KIB[:SECONDS]   write a save of so many files, over that time, and say that it is complete
begin=NAME:FILES:KIB            write one and leave it so
until-term                      go on when SIGTERM has come
until=PATH                      go on when this file is there
ignore-term                     from now on SIGTERM does nothing
eat-memory                      until the kernel says no
hold                            wait for ever
exit=CODE                       end
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(os.environ["PUBLISH_ROOT"])
ATTEMPT = os.environ["DISPATCH_ATTEMPT"]
AGENT = os.environ.get("TRAINERS_AGENT", "/opt/dispatch-agent/bin/dispatch-agent")
told_to_end = False


def main() -> None:
    signal.signal(signal.SIGTERM, on_term)
    found = sorted(path for path in (ROOT / "resume" / ATTEMPT).glob("[!.]*"))
    say(attempt=ATTEMPT, epoch=os.environ["DISPATCH_EPOCH"], resume=[path.name for path in found])
    for path in found:
        say(resumed=json.loads((path / "state.json").read_text()))
    for word in sys.argv[1:]:
        name, _, value = word.partition("=")
        do(name, value)
    say(done=True)


def do(name: str, value: str) -> None:
    if name in {"save", "begin"}:
        save(name, *value.split(":"))
    elif name == "until-term":
        wait(lambda: told_to_end)
        say(told_to_end=True)
    elif name == "until":
        wait(Path(value).exists)
    elif name == "touch":
        (ROOT / "exec" / ATTEMPT / value).touch()
    elif name == "ignore-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif name == "eat-memory":
        eaten = []
        while True:
            eaten.append(os.urandom(1 << 20))
    elif name == "hold":
        wait(lambda: False)
    elif name == "exit":
        sys.exit(int(value))
    else:
        sys.exit(f"no such thing to do: {name}")


def save(how: str, name: str, files: str, kib: str, seconds: str = "0") -> None:
    folder = ROOT / "exec" / ATTEMPT / name
    folder.mkdir(parents=True)
    for number in range(int(files)):
        (folder / f"part-{number}.bin").write_bytes(os.urandom(int(kib) << 10))
        time.sleep(float(seconds) / int(files))
    (folder / "state.json").write_text(json.dumps({"save": name, "attempt": ATTEMPT}))
    if how == "save":
        subprocess.run([AGENT, "publish", "complete", str(folder)], check=True, stdout=subprocess.DEVNULL)
    say(**{how: name})


def wait(ready) -> None:
    while not ready():
        time.sleep(0.02)


def on_term(*_: object) -> None:
    global told_to_end  # noqa: PLW0603 (a handler has nowhere else to say it)
    told_to_end = True


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


main()

"""Two threads that save and mark at the same time: only the markers' numbers tell the order."""

import threading

from trainer import Trainer, main, noise

from dispatch_agent.checkpoint.folder import mark_complete


def train(trainer: Trainer) -> None:
    def saves(kind: str) -> None:
        for n in trainer.numbers:
            save = trainer.folder / f"{kind}-{n}"
            trainer.plan(save.name, {"weights": noise((kind, n))})
            save.mkdir()
            trainer.write(save / "weights", noise((kind, n)))
            mark_complete(save)

    threads = [threading.Thread(target=saves, args=(kind,)) for kind in ("model", "optimizer")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


main(train)

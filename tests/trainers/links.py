"""Marked saves with links inside: kept ones in `kept-<n>`, one that leaves the save in `leaving-<n>`."""

from trainer import Trainer, main, noise

from dispatch_agent.checkpoint.folder import mark_complete


def train(trainer: Trainer) -> None:
    for n in trainer.numbers:
        for kind in ("kept", "leaving"):
            save = trainer.folder / f"{kind}-{n}"
            (save / "sub").mkdir(parents=True)
            trainer.write(save / "weights", noise(n))
            (save / "sub" / "same").symlink_to("../weights")
            (save / "dangling").symlink_to("sub/nothing")
            (save / "hard").hardlink_to(save / "weights")
            if kind == "leaving":
                (save / "sub" / "out").symlink_to(f"../../kept-{n}/weights")
            mark_complete(save)


main(train)

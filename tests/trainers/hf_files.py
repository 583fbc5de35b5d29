"""What a Trainer's checkpoint-<n> holds, and the order in which rank 0 writes it."""

from trainer import Trainer, archive, renamed_in, safetensors


def files_of(name: str, ranks: int) -> dict[str, bytes]:
    states = {f"rng_state_{rank}.pth": archive((name, rank), 1000) for rank in range(ranks)}
    if ranks == 1:
        states = {"rng_state.pth": archive((name, 0), 1000)}
    return {
        "config.json": b'{"model_type": "fake"}',
        "model.safetensors": safetensors(name),
        "training_args.bin": archive((name, "args"), 500),
        "optimizer.pt": archive((name, "optimizer")),
        "scheduler.pt": archive((name, "scheduler"), 500),
        **states,
        "trainer_state.json": b'{"global_step": 1, "log_history": [' + b'"x",' * 200 + b'"y"]}',
    }


def rank_0(trainer: Trainer, name: str, files: dict[str, bytes]) -> None:
    save = trainer.folder / name
    save.mkdir()
    late = [path for path in files if path.startswith("rng_state_") and path != "rng_state_0.pth"]
    for path, data in files.items():
        if path in late:
            continue
        if path == "model.safetensors":
            renamed_in(trainer, save / path, data)
        else:
            trainer.write(save / path, data)
        trainer.step()


def slow_ranks(trainer: Trainer, name: str, files: dict[str, bytes], pauses: int) -> None:
    for path, data in files.items():
        if path.startswith("rng_state_") and path != "rng_state_0.pth":
            for _ in range(pauses):
                trainer.step()
            trainer.write(trainer.folder / name / path, data)


def rotate(trainer: Trainer, name: str) -> None:
    """Delete a checkpoint in the measured order: it keeps its trainer_state.json nearly to the end."""
    save = trainer.folder / name
    order = ["training_args.bin", "scheduler.pt", "optimizer.pt", "model.safetensors"]
    order += sorted(path.name for path in save.iterdir() if path.name.startswith("rng_state"))
    for path in [*order, "trainer_state.json", "config.json"]:
        (save / path).unlink()
        trainer.step()
    save.rmdir()

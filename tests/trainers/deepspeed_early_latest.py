"""DeepSpeed, two ranks: rank 0 names the save in `latest` (empty for a moment) before rank 1 has begun its shard."""

from trainer import Trainer, archive, main


def train(trainer: Trainer) -> None:
    for n in trainer.numbers:
        name = f"global_step{n}"
        files = {
            "mp_rank_00_model_states.pt": archive((name, "model")),
            "zero_pp_rank_0_mp_rank_00_optim_states.pt": archive((name, 0)),
            "zero_pp_rank_1_mp_rank_00_optim_states.pt": archive((name, 1)),
        }
        trainer.plan(name, files)
        save = trainer.folder / name
        save.mkdir()
        *early, late = files
        for path in early:
            trainer.write(save / path, files[path])
        (trainer.folder / "latest").write_bytes(b"")
        for _ in range(5):
            trainer.step()
        (trainer.folder / "latest").write_text(name)
        for _ in range(10):
            trainer.step()
        trainer.write(save / late, files[late])
        trainer.step()


main(train)

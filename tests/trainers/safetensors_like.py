"""Sharded safetensors of mode 0600, the index last, then `publish complete`'s own call."""

import json

from trainer import Trainer, main, renamed_in, safetensors

from dispatch_agent.checkpoint.folder import mark_complete


def train(trainer: Trainer) -> None:
    for n in trainer.numbers:
        name = f"step-{n}"
        shards = {f"model-{k:05d}-of-00002.safetensors": safetensors((name, k)) for k in (1, 2)}
        index = json.dumps({"weight_map": {f"w{k}": path for k, path in enumerate(shards)}}).encode()
        trainer.plan(name, {**shards, "model.safetensors.index.json": index})
        save = trainer.folder / name
        save.mkdir()
        for path, data in shards.items():
            renamed_in(trainer, save / path, data)
            trainer.step()
        trainer.write(save / "model.safetensors.index.json", index)
        trainer.step()
        mark_complete(save)
        trainer.step()


main(train)

"""One agent of benchmarks/trainer.py: a small GPT-2 by the Trainer of Transformers, in one of several ways."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import _text
import shoal
from shoal.frameworks.transformers import ShoalTrainer, ShoalTrainingArguments
from transformers_trainer import Windows, gpt2


def main(args: argparse.Namespace) -> None:
    shoal.init()
    torch.set_num_threads(1)
    text = _text.load(args.text, args.context)
    model = gpt2(len(text.alphabet), args.context, args.width, args.layers, args.seed)
    ours = args.way != "ddp"
    options: dict[str, Any] = {
        "output_dir": tempfile.gettempdir(),
        "use_cpu": True,
        "max_steps": args.steps,
        "per_device_train_batch_size": args.batch,
        "per_device_eval_batch_size": 32,
        "learning_rate": args.lr * (shoal.size() ** 0.5 if args.way == "root" else 1),
        "warmup_steps": args.steps // 20,
        "lr_scheduler_type": "cosine",
        "logging_steps": args.steps // 4,
        "save_strategy": "no",
        "seed": args.seed,
        "report_to": "none",
        "disable_tqdm": True,
    }
    data = {"train_dataset": Windows(text.train, args.context), "eval_dataset": Windows(text.test, args.context)}
    if not ours:
        trainer = transformers.Trainer(model, transformers.TrainingArguments(**options), **data)
    elif args.way == "gradients":
        trainer = ShoalTrainer(
            model,
            ShoalTrainingArguments(**options),
            **data,
            wrapper=shoal.bluefog.DistributedGradientAllreduceOptimizer,
        )
    else:
        accumulate = 0 if args.way == "default" else 1
        trainer = ShoalTrainer(model, ShoalTrainingArguments(**options, adam_accumulate=accumulate), **data)
    if not trainer.is_world_process_zero():
        transformers.utils.logging.set_verbosity_error()
    trainer.train()
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        Path(args.json).write_text(json.dumps({"loss": found["eval_loss"]}))
    if not ours:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    shoal.shutdown()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", required=True)
    parser.add_argument("--json", required=True)
    parser.add_argument("--text", default="")
    for name in ("steps", "batch", "context", "width", "layers", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())

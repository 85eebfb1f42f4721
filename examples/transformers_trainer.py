"""A small GPT-2 on a text, by the Trainer of Transformers: each agent trains a model of its own on its part of it.

    shoal run --no-prefix -n 4 examples/transformers_trainer.py --output out/trainer
    shoal run --no-prefix -n 4 examples/transformers_trainer.py --output out/trainer --resume

Against a script for one process only the import differs. ``torchrun`` starts it as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import _text
import shoal
from shoal.frameworks.transformers import ShoalTrainer as Trainer
from shoal.frameworks.transformers import ShoalTrainingArguments as TrainingArguments


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A text in pieces of ``context`` characters, one after another."""

    def __init__(self, text: Tensor, context: int) -> None:
        self._pieces = text[: len(text) // context * context].view(-1, context)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._pieces[index], "labels": self._pieces[index]}


def gpt2(characters: int, context: int, width: int, layers: int, seed: int) -> GPT2LMHeadModel:
    """From random weights, the same on all agents."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=characters,
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # GPT-2 does not say so itself, and is warned about in Transformers 5.24
    return model


def main(args: argparse.Namespace) -> None:
    arguments = TrainingArguments(
        output_dir=args.output,
        use_cpu=True,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=args.lr,
        warmup_steps=args.steps // 20,
        bf16=args.bf16,
        eval_strategy="steps",
        eval_steps=args.save_every,
        save_steps=args.save_every,
        save_total_limit=2,
        load_best_model_at_end=True,
        logging_steps=args.save_every // 4 or 1,
        seed=args.seed,
        report_to="none",
        disable_tqdm=True,
    )
    text = _text.load(args.text, args.context)
    trainer = Trainer(
        gpt2(len(text.alphabet), args.context, args.width, args.layers, args.seed),
        arguments,
        train_dataset=Windows(text.train, args.context),
        eval_dataset=Windows(text.test[: args.test], args.context),
    )
    trainer.train(resume_from_checkpoint=args.resume)
    print_once = print if trainer.is_world_process_zero() else lambda *_: None
    print_once(f"the mean of {shoal.size()} models: {trainer.evaluate()['eval_loss']:.3f} nats a character")
    final = Path(args.output) / "final"
    trainer.save_model(str(final))
    if trainer.is_world_process_zero():
        model = GPT2LMHeadModel.from_pretrained(final)
        torch.manual_seed(args.seed)
        written = model.generate(
            text.test[None, :8],
            max_length=args.context,
            do_sample=True,
            attention_mask=torch.ones(1, 8),
            pad_token_id=0,
        )
        print(text.decode(written[0]))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", default="", help=f"a file; without one {_text.HELP}")
    parser.add_argument("--output", default="out/trainer", help="a folder that all machines share")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in it")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints, and evaluations")
    parser.add_argument("--batch", type=int, default=8, help="pieces of the text in one pass of one agent")
    parser.add_argument("--accumulate", type=int, default=1, help="passes in one step")
    parser.add_argument("--context", type=int, default=64, help="characters in a piece")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--test", type=int, default=16384, help="characters to evaluate on")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    shoal.init()
    main(parse())
    shoal.shutdown()

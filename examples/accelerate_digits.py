"""Handwritten digits, with a loop for Accelerate: each agent trains a model of its own on its part of the images.

    shoal run --no-prefix -n 4 examples/accelerate_digits.py --output out/accelerate
    accelerate launch --multi_gpu --num_processes 4 examples/accelerate_digits.py --output out/accelerate

Against a script for Accelerate only the import differs, and the model that is evaluated: the mean of all agents'.
``--stop-after 3`` and then ``--resume`` go on where it ended, bit for bit.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.frameworks.accelerate import ShoalAccelerator as Accelerator


def main(args: argparse.Namespace) -> float:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    train, test = TensorDataset(images[:1348], labels[:1348]), TensorDataset(images[1348:], labels[1348:])
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_loader, test_loader = DataLoader(train, batch_size=8, shuffle=True), DataLoader(test, batch_size=64)
    # In steps of one process: Accelerate's schedule goes on by as many of them as there are processes.
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train_loader) // args.accumulate)
    model, optimizer, schedule, train_loader, test_loader = accelerator.prepare(
        model, optimizer, schedule, train_loader, test_loader
    )
    if args.resume:
        accelerator.load_state(args.output)
    for epoch in range(train_loader.iteration, min(args.epochs, args.stop_after or args.epochs)):
        model.train()
        for inputs, targets in train_loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        right = []
        with shoal.consensus(model), torch.no_grad():
            for inputs, targets in test_loader:
                right.append(accelerator.gather_for_metrics(model(inputs).argmax(-1) == targets))
        accuracy = torch.cat(right).double().mean().item()
        accelerator.print(f"epoch {epoch + 1}: the mean model reads {accuracy:.2%} of {len(torch.cat(right))} images")
        accelerator.save_state(args.output)
    accelerator.save_model(model, f"{args.output}/final")
    return accuracy


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", default="out/accelerate", help="a folder that all machines share")
    parser.add_argument("--resume", action="store_true", help="go on from the state that was saved there")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--stop-after", type=int, default=0, help="end after so many epochs, to go on another time")
    parser.add_argument("--accumulate", type=int, default=1, help="passes in one step")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse())
    shoal.shutdown()

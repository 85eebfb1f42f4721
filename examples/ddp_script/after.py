"""The training script of `before.py` with Shoal, so that it survives failures; compare the two with diff.

shoal run -n 2 --on-failure restart examples/ddp_script/after.py out/after
"""

import argparse
import math
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.tensorboard import SummaryWriter

import shoal

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path, help="for checkpoints, the best model and TensorBoard's files")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--patience", type=int, default=3, help="stop after so many epochs without improvement")
args = parser.parse_args()
args.folder.mkdir(parents=True, exist_ok=True)

torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
train, validation = random_split(TensorDataset(images, labels), [0.75, 0.25])
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

shoal.init()
sampler = shoal.data.AgentSampler(train)
loader = DataLoader(train, batch_size=16, sampler=sampler, num_workers=1, persistent_workers=True)
validation_loader = DataLoader(validation, batch_size=64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = shoal.DecentralizedOptimizer(optimizer, model, mix_state=("exp_avg_sq",))
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * len(loader))
writer = SummaryWriter(args.folder) if shoal.rank() == 0 else None

parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
state = {"epoch": 0, "step": 0, "best": math.inf, "epochs_without_improvement": 0}
checkpoint = shoal.Checkpoint(**parts, state=state)
checkpoint.load(args.folder, missing_ok=True)

while state["epoch"] < args.epochs and state["epochs_without_improvement"] < args.patience:
    sampler.set_epoch(state["epoch"])
    model.train()
    for batch, target in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(model(batch), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        state["step"] += 1
        if state["step"] % 10 == 0:
            shoal.metrics({"loss": loss}).log(writer, state["step"])

    model.eval()
    with torch.no_grad(), shoal.consensus(model):
        losses = [cross_entropy(model(batch), target, reduction="sum") for batch, target in validation_loader]
    found = shoal.metrics({"loss": sum(losses) / len(validation)})["loss"].mean
    if writer:
        writer.add_scalar("validation loss", found, state["epoch"])
        print(f"epoch {state['epoch']}: validation loss {found:.3f}", flush=True)
    state["epoch"] += 1
    state["epochs_without_improvement"] += 1
    if found < state["best"]:
        state["best"], state["epochs_without_improvement"] = found, 0
        shoal.save(model, args.folder / "best.pt")
    checkpoint.save(args.folder, state["epoch"])

print(f"ended after step {state['step']}, best validation loss {state['best']:.3f}", flush=True)

"""A script for Horovod runs after its import has changed, with ``shoal run`` as its launcher, and learns what one
process learns that has all batches."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import shoal
from support.limits import scaled

SIZE, BATCH, EPOCHS, LR = 4, 32, 3, 0.1

SCRIPT = """
import argparse
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--batch-size", type=int)
parser.add_argument("--epochs", type=int)
parser.add_argument("--lr", type=float)
args = parser.parse_args()

hvd.init()
torch.manual_seed(42 + hvd.rank())
torch.set_num_threads(1)

train, test = (TensorDataset(*one) for one in torch.load(f"{args.folder}/digits.pt"))
sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)
test_sampler = DistributedSampler(test, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
test_loader = DataLoader(test, batch_size=256, sampler=test_sampler)

model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
if hvd.rank() == 0:
    model.load_state_dict(torch.load(f"{args.folder}/begin.pt"))
scaler = hvd.size()
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * scaler, momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none, op=hvd.Average
)

def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()

for epoch in range(1, args.epochs + 1):
    model.train()
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    model.eval()
    right = 0.0
    with torch.no_grad():
        for images, labels in test_loader:
            right += (model(images).argmax(1) == labels).float().sum().item()
    accuracy = metric_average(right / len(test_sampler), "avg_accuracy")
    if hvd.rank() == 0:
        print(f"accuracy after epoch {epoch}: {accuracy}")

torch.save(model.state_dict(), f"{args.folder}/end-{hvd.rank()}.pt")
hvd.shutdown()
"""


def digits() -> list[tuple[Tensor, Tensor]]:
    """For training, as many as all agents have batches of, so that none is there twice; and to be tested on."""
    from sklearn.datasets import load_digits  # it takes a second, which tests that do not use it need not pay

    result = load_digits()
    images, labels = torch.tensor(result.data / 16, dtype=torch.float32), torch.tensor(result.target)
    return [(images[:1280], labels[:1280]), (images[1280:1796], labels[1280:1796])]


def by_one_process(begin: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[float]]:
    """Its batches are those of all agents: each of four agents has every fourth digit."""
    (images, labels), (test_images, test_labels) = digits()
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    model.load_state_dict(begin)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR * SIZE, momentum=0.5)
    accuracies = []
    for _ in range(EPOCHS):
        for at in range(0, len(images), SIZE * BATCH):
            optimizer.zero_grad()
            own = slice(at, at + SIZE * BATCH)
            torch.nn.functional.cross_entropy(model(images[own]), labels[own]).backward()
            optimizer.step()
        with torch.no_grad():
            accuracies.append((model(test_images).argmax(1) == test_labels).float().mean().item())
    return model.state_dict(), accuracies


@pytest.mark.slow  # tests/compat/test_horovod.py has the calls of the script in a fleet
@pytest.mark.timeout(150)  # each agent imports torch, which takes long where others want the cores
def test_the_script_trains_like_one_process(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("import horovod.torch as hvd", "import shoal.compat.horovod as hvd"))
    begin = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).state_dict()
    torch.save(digits(), tmp_path / "digits.pt")
    torch.save(begin, tmp_path / "begin.pt")
    options = ["--batch-size", str(BATCH), "--epochs", str(EPOCHS), "--lr", str(LR)]
    path = os.pathsep.join((str(Path(shoal.__file__).parents[1]), os.environ["PYTHONPATH"]))
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "run", "--no-prefix", "-n", str(SIZE), str(script), str(tmp_path), *options],
        capture_output=True,
        text=True,
        timeout=scaled(140),
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    ends = [torch.load(tmp_path / f"end-{rank}.pt") for rank in range(SIZE)]
    expected, accuracies = by_one_process(begin)
    for name, value in ends[0].items():
        assert all(torch.equal(value, end[name]) for end in ends)
        assert torch.allclose(value, expected[name], rtol=0, atol=2e-5)
        assert not torch.allclose(value, begin[name], rtol=0, atol=1e-2)
    printed = [float(one) for one in re.findall(r"accuracy after epoch \d: (\S+)", done.stdout)]
    assert printed == pytest.approx(accuracies, abs=3 / 516)  # rounding may turn a digit or two
    assert printed[-1] > 0.8

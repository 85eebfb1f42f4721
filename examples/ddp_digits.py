"""A script for DistributedDataParallel as one writes it, to become decentralized by the lines that the README shows.

torchrun --nproc-per-node 4 examples/ddp_digits.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

dist.init_process_group("gloo")
torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
train, test = random_split(TensorDataset(images, labels), [0.75, 0.25])
loader = DataLoader(train, batch_size=16, sampler=DistributedSampler(train))
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(10):
    loader.sampler.set_epoch(epoch)
    for batch, target in loader:
        optimizer.zero_grad()
        cross_entropy(model(batch), target).backward()
        optimizer.step()

batch, target = next(iter(DataLoader(test, batch_size=len(test))))
correct = (model(batch).argmax(1) == target).float().mean().item()
print(f"rank {dist.get_rank()}: {correct:.1%} of {len(test)} test images")
dist.destroy_process_group()

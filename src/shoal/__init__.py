"""Shoal: decentralized training on PyTorch."""

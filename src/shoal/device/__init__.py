"""Devices whose memory the CPU does not read: their streams, and memory there that other processes can map.

Imports torch and nothing of Shoal. ``device.py`` says what a device is to the rest, ``cuda.py`` is one of NVIDIA's,
over ``driver.py``, the few functions of CUDA's driver that torch does not have.
"""

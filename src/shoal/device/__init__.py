"""Devices whose memory the CPU does not read: their streams, and their memory that other processes can map.

This package imports torch and no other part of Shoal. ``device.py`` has the interface of a device, ``cuda.py``
implements it for NVIDIA devices with ``driver.py``, the few functions of CUDA's driver that torch does not have.
"""

"""Averaging with neighbours against Gloo's all_reduce, memory, and a wire of 1 Gbit/s: ``shoal bench``.

python benchmarks/speed.py                 # about a minute, on a quiet machine
sudo python benchmarks/speed.py --network  # the wire too, between two network namespaces
"""

import sys

from shoal.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))

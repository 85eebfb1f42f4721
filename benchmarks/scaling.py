"""How the time of a call grows from 2 to 8 agents, as in the BlueFog paper's figure 11: ``shoal bench --scaling``.

python benchmarks/scaling.py --picture scaling.png    # about a minute, on a quiet machine
"""

import sys

from shoal.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "--scaling", *sys.argv[1:]]))

"""What papers report, beside what the network model says of it: prints a page, Markdown.

python benchmarks/papers > docs/topologies/papers.md    # a minute
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python has put this folder on the path; the package is found from the one around it.
    sys.path[0] = str(Path(__file__).parents[1])
    from papers.page import page

    print(page(), end="")

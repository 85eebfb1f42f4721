"""Known holes in what the locks in requirements install, and in torch: asks the OSV database, one question for all.

Exit status 0: none, or the database was not to be had, which is said; 1: some, and each is named.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
SERVICE = "https://api.osv.dev/v1/querybatch"
SECONDS = 10.0
ACCEPTED: dict[str, str] = {}
"""Holes that do not concern us, each with the reason."""


def pinned() -> list[tuple[str, str]]:
    """Names and versions of all that is installed, on any platform."""
    texts = [one.read_text() for one in ((ROOT / "constraints.txt"), *(ROOT / "requirements").glob("*.lock"))]
    return sorted(set(re.findall(r"^([\w.-]+)==([\w.+!]+)", "\n".join(texts), re.MULTILINE)))


def holes(service: str = SERVICE) -> dict[str, list[str]]:
    """The holes known of each package; raises OSError or ValueError where the database does not answer."""
    packages = pinned()
    queries = [{"package": {"name": name, "ecosystem": "PyPI"}, "version": version} for name, version in packages]
    request = urllib.request.Request(
        service, json.dumps({"queries": queries}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        results = json.load(answer)["results"]
    found = {}
    for (name, version), result in zip(packages, results, strict=True):
        ids = [one["id"] for one in result.get("vulns") or () if one["id"] not in ACCEPTED]
        if ids:
            found[f"{name} {version}"] = ids
    return found


def main(service: str = SERVICE) -> int:
    try:
        found = holes(service)
    except (OSError, ValueError, KeyError) as error:
        print(f"audit: NOT LOOKED UP, {service} does not answer: {error}")
        return 0
    for package, ids in found.items():
        print(f"audit: {package} has known holes: {', '.join(ids)}")
    if not found:
        print(f"audit: no hole is known in {len(pinned())} packages")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

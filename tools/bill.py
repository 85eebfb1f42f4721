"""What an install of Shoal brings (without extras), with versions and licences: a bill of materials, CycloneDX 1.5."""

from __future__ import annotations

import json
import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Where a package says its licence only in words of its own.
_SPDX = {
    "apache license 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd-3-clause": "BSD-3-Clause",
    "mit": "MIT",
    "mit license": "MIT",
    "python software foundation license": "PSF-2.0",
    "the unlicense (unlicense)": "Unlicense",
}
_CLASSIFIER = "License :: OSI Approved :: "


def needs(package: Distribution) -> list[str]:
    """What a package asks for on this machine, without extras."""
    wanted = [Requirement(text) for text in package.requires or ()]
    return [canonicalize_name(one.name) for one in wanted if not one.marker or one.marker.evaluate({"extra": ""})]


def brought(name: str) -> dict[str, Distribution]:
    """All that an install brings, by name; what is not installed here is left out."""
    found: dict[str, Distribution] = {}
    names = [canonicalize_name(name)]
    while names:
        one = names.pop()
        if one not in found:
            try:
                found[one] = distribution(one)
            except PackageNotFoundError:
                continue
            names += needs(found[one])
    return dict(sorted(found.items()))


def licence(package: Distribution) -> str:
    """As SPDX has it, where that can be told; else the package's own words, in one line."""
    metadata = package.metadata
    if metadata.get("License-Expression"):
        return str(metadata["License-Expression"])
    said = [text.removeprefix(_CLASSIFIER) for text in metadata.get_all("Classifier", []) if _CLASSIFIER in text]
    words = re.sub(r"\s+", " ", str(metadata.get("License") or ""))
    known = [_SPDX[text.lower()] for text in (words, *said) if text.lower() in _SPDX]
    return known[0] if known else (words or "; ".join(said) or "unknown")[:80]


def bill(name: str = "shoal") -> dict[str, Any]:
    packages = brought(name)

    def reference(one: str) -> str:
        return f"pkg:pypi/{one}@{packages[one].version}"

    components = [
        {
            "type": "library",
            "bom-ref": reference(one),
            "name": one,
            "version": package.version,
            "purl": reference(one),
            "licenses": [_licence_entry(package)],
        }
        for one, package in packages.items()
    ]
    root = next(one for one in components if one["name"] == canonicalize_name(name))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": root},
        "components": [one for one in components if one is not root],
        "dependencies": [
            {
                "ref": reference(one),
                "dependsOn": sorted({reference(need) for need in needs(package) if need in packages}),
            }
            for one, package in packages.items()
        ],
    }


def _licence_entry(package: Distribution) -> dict[str, Any]:
    said = licence(package)
    is_spdx = package.metadata.get("License-Expression") or said in _SPDX.values()
    return {"expression": said} if is_spdx else {"license": {"name": said}}


if __name__ == "__main__":
    print(json.dumps(bill(), indent=1))

"""The installed packages: locked by hash, available in the index, and with known licences."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = {name: (ROOT / "requirements" / f"{name}.lock").read_text() for name in ("ci", "frameworks", "kernels")}
# Free licences whose terms an install keeps by itself. Others are looked at before they get in here.
FREE = {"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "ISC", "LLVM-exception", "MIT", "MPL-2.0"}
FREE |= {"0BSD", "BSD", "BSD License", "PSF-2.0", "Unlicense", "Zlib"}
OF_CUDA = ("nvidia-", "cuda-", "triton")


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def locked() -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", "\n".join(LOCKS.values()), re.MULTILINE):
        result.setdefault(canonicalize_name(name), []).append(version)
    return result


def test_the_locks_have_every_requirement_but_torch_within_its_bounds() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    texts = [*project["dependencies"], *(one for extra in extras for one in extra)]
    versions = locked()
    assert len(texts) > 10 and "torch" not in versions
    for wanted in map(Requirement, texts):
        name = canonicalize_name(wanted.name)
        assert name in ("torch", "shoal") or versions[name], name
        assert all(wanted.specifier.contains(version) for version in versions.get(name, [])), wanted
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE):
        assert name == "torch" or set(versions[name]) == {version}, name


@pytest.mark.parametrize("name", LOCKS)
def test_each_file_of_a_lock_has_a_hash_and_no_fixed_index(name: str) -> None:
    entries = re.split(r"\n(?=\S)", LOCKS[name].strip())
    assert len(entries) > 50 or name == "kernels"
    for entry in entries:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry[:80]
    assert "://" not in LOCKS[name] and "file:" not in LOCKS[name]


@pytest.mark.parametrize("name", ["numpy", "networkx", "rich", "torch"])
def test_the_sbom_lists_the_installed_packages(name: str) -> None:
    bill = tool("bill").bill()
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "shoal")
    [component] = [one for one in bill["components"] if one["name"] == name]
    assert component["purl"] == f"pkg:pypi/{name}@{component['version']}" and component["licenses"]
    [edges] = [one["dependsOn"] for one in bill["dependencies"] if one["ref"].startswith("pkg:pypi/shoal@")]
    assert component["bom-ref"] in edges
    references = {one["bom-ref"] for one in bill["components"]}
    assert all(set(one["dependsOn"]) <= references for one in bill["dependencies"])
    assert "pkg:pypi/pytest@" not in references  # of an extra


def test_installed_packages_have_known_licences() -> None:
    bill = tool("bill")
    result = {
        name: bill.licence(package) for name, package in bill.brought("shoal").items() if not name.startswith(OF_CUDA)
    }
    assert len(result) > 10
    unknown = {
        name: output
        for name, output in result.items()
        if not set(re.split(r"\s+(?:AND|OR|WITH)\s+", output.replace("(", "").replace(")", ""))) <= FREE
    }
    assert not unknown


@contextmanager
def database(known: dict[str, list[str]], status: int = 200) -> Iterator[str]:
    """Something that answers like OSV's: holes by package name; its address."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            decoded = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
            results: list[dict[str, Any]] = [
                {"vulns": [{"id": one} for one in known[query["package"]["name"]]]}
                if query["package"]["name"] in known and query["version"]
                else {}
                for query in decoded
            ]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps({"results": results}).encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def test_the_audit_lists_each_vulnerability(capsys: pytest.CaptureFixture[str]) -> None:
    audit = tool("audit")
    with database({"torch": ["CVE-1", "CVE-2"]}) as service:
        assert audit.main(service) == 1
    assert "audit: torch 2.13.0 has known holes: CVE-1, CVE-2" in capsys.readouterr().out
    audit.ACCEPTED["CVE-1"] = "of another platform"
    with database({"torch": ["CVE-1"]}) as service:
        assert audit.main(service) == 0
    assert f"no hole is known in {len(audit.pinned())} packages" in capsys.readouterr().out
    assert len(audit.pinned()) > 50


@pytest.mark.parametrize("status", [200, 500])
def test_an_audit_without_network_reports_it_and_fails_nothing(status: int, capsys: pytest.CaptureFixture[str]) -> None:
    with database({}, status) as service:
        where = service if status == 500 else "http://127.0.0.1:1/"
        assert tool("audit").main(where) == 0
    assert "NOT LOOKED UP" in capsys.readouterr().out

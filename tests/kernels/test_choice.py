"""The choice of the kernels' implementation; a warning gives the reason where it is not Triton."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shoal import kernels
from shoal.kernels import implementation_of, why_not_triton
from shoal.kernels.native import why_not_native
from support.kernels import DEVICE, QUIET, REASON
from support.limits import scaled

pytestmark = QUIET
ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "benchmarks" / "gpu.py"
PAGE = ROOT / "docs" / "kernels.md"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    kernels.why_not_triton.cache_clear()
    yield
    kernels.why_not_triton.cache_clear()


def test_cpu_tensors_use_compiled_kernels_or_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert implementation_of(torch.empty(3)) == ("torch" if why_not_native() else "native")
    monkeypatch.setattr(kernels, "library", lambda: None)
    assert implementation_of(torch.empty(3)) == "torch"


def test_the_reason_names_the_package_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_not_triton() == "triton is not installed: pip install 'shoal[cuda]'"


def test_the_reason_names_the_missing_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    assert why_not_triton() == "there is no CUDA device"


def test_devices_of_other_vendors_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "ROCm" in str(why_not_triton())


def test_a_triton_release_that_rounds_weights_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(kernels, "hands_over_whole_floats", lambda: False)
    assert "in 32 bits" in str(why_not_triton())
    kernels.why_not_triton.cache_clear()
    monkeypatch.setattr(kernels, "hands_over_whole_floats", lambda: True)
    assert why_not_triton() is None


class OnDevice:
    """What `implementation_of` asks of a tensor, of one on a device that is not here."""

    is_cuda = True
    device = torch.device("cuda", 0)


@pytest.mark.parametrize(("capability", "implementation"), [((7, 5), "torch"), ((8, 0), "triton"), ((9, 0), "triton")])
def test_devices_before_ampere_use_torch(
    capability: tuple[int, int], implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "why_not_triton", functools.cache(lambda: None))
    monkeypatch.setattr(kernels, "_capability", lambda device: capability)
    assert implementation_of(OnDevice()) == implementation  # type: ignore[arg-type]


def test_the_pages_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    example = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert example is not None
    exec(example[1], {})
    assert capsys.readouterr().out.startswith(f"[1.5, 1.5, 1.5, 1.5, 1.5] {implementation_of(torch.empty(3))} ")


def test_importing_kernels_does_not_import_triton() -> None:
    command = "import sys, shoal.kernels.sums; print('triton' in sys.modules)"
    results = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=True, timeout=scaled(60)
    )
    assert results.stdout.strip() == "False"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, on which it takes minutes")
def test_the_benchmark_reports_the_missing_device() -> None:
    ran = subprocess.run([sys.executable, str(BENCHMARK)], capture_output=True, text=True, timeout=scaled(60))
    assert ran.returncode == 0, ran.stderr
    assert "no CUDA device" in ran.stdout


def test_the_benchmarks_measured_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, without a device: its times are not recorded."""
    spec = importlib.util.spec_from_file_location("benchmark_of_devices", BENCHMARK)
    assert spec is not None and spec.loader is not None
    gpu = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, gpu)
    spec.loader.exec_module(gpu)
    monkeypatch.setattr(gpu, "DEVICE", DEVICE)
    monkeypatch.setattr(gpu, "CHECKED", 1003)
    implementations = ["torch"] if REASON else ["torch", "triton"]
    assert gpu.differing(implementations) == []
    rows = gpu.sums(1000, "float32", implementations)
    assert {row.implementation for row in rows} >= set(implementations)
    for row in rows:
        row.run()

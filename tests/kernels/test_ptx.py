"""Programs as compiled for a device, checked in the text that Triton generates, without a device.

Bits are equal where each operation is rounded once and keeps subnormal numbers, so the text is searched for other
instructions: ``.ftz``, ``.approx``, ``.full``, and multiplications and additions without ``.rn``, which the assembler
may fuse.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from support.limits import scaled
from support.ptx import CASES

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, object]]:
    """Of each case what it has: by a process of its own, in which programs are not for the interpreter."""
    ran = subprocess.run(
        [sys.executable, "-m", "support.ptx"], capture_output=True, text=True, timeout=scaled(280), env=_environment()
    )
    if ran.returncode == 3:
        pytest.skip(ran.stderr.strip())
    assert ran.returncode == 0, ran.stderr
    stdout: dict[str, dict[str, object]] = json.loads(ran.stdout)
    return stdout


def _environment() -> dict[str, str]:
    left = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**left, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@pytest.mark.parametrize("name", CASES)
def test_every_operation_is_rounded_once_and_keeps_subnormal_numbers(
    name: str, compiled: dict[str, dict[str, object]]
) -> None:
    result = compiled[name]
    instructions = set(result["instructions"])  # type: ignore[call-overload]
    assert result["cubin"], "the assembler made nothing of it"
    assert not {one for one in instructions if ".ftz" in one or ".approx" in one or ".full" in one}
    arithmetic = {one for one in instructions if one.split(".")[0] in ("add", "sub", "mul", "fma", "div", "sqrt")}
    floating = {one for one in arithmetic if one.endswith((".f32", ".f64", ".f16", ".bf16"))}
    assert {one for one in floating if ".rn." not in one} == set()
    assert {".".join(one.split(".")[:2]) + "." + one.split(".")[-1] for one in floating} == set(CASES[name].expected)


@pytest.mark.parametrize("name", CASES)
def test_positions_are_computed_in_64_bits(name: str, compiled: dict[str, dict[str, object]]) -> None:
    """No tensor of 2^31 numbers is available, so the test reads the types passed to Triton."""
    assert compiled[name]["narrow"] == []


@pytest.mark.parametrize("name", CASES)
def test_scalar_arguments_keep_all_their_bits(name: str, compiled: dict[str, dict[str, object]]) -> None:
    """Triton converts Python floats to float32 unless a program declares another type."""
    assert compiled[name]["launched"] == compiled[name]["declared"]


def test_every_program_has_a_case() -> None:
    from shoal.kernels import programs

    names = {"weighted_sum", "reduction"}
    assert {case.program for case in CASES.values()} == names
    assert names <= vars(programs).keys()

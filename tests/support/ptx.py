"""Compiles Shoal's programs for an NVIDIA device that need not be there, and says which instructions they have."""

from __future__ import annotations

import json
import re
import sys
from typing import Any, NamedTuple

import torch

ARCHITECTURE = 90


class Case(NamedTuple):
    """A program with some of its constants.

    Attributes:
        types: Of the pointers to numbers, and of the other arguments.
        expected: The exact set of floating-point instructions that it must have, with their rounding.
    """

    program: str
    types: dict[str, str]
    constants: dict[str, Any]
    expected: tuple[str, ...]


def _of(kind: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), f"*{kind}")


X = " ".join(f"x{place}" for place in range(1, 17))
SUMMED = f"out own {X}"
REDUCED = f"out x0 {X.removesuffix(' x16')}"
SUM = {"TERMS": 3, "GOES_ON": False, "TOGETHER": False, "SCALE": "no", "BLOCK": 1024}
MEAN = {**SUM, "TOGETHER": True, "SCALE": "divide"}
REDUCTION = {"INPUTS": 4, "STARTS": 4, "HOW": "average", "BLOCK": 1024}

CASES: dict[str, Case] = {}
for kind, wide in (("fp32", "fp32"), ("fp64", "fp64"), ("fp16", "fp32"), ("bf16", "fp32")):
    f = wide.replace("fp", "f")
    fma, mul, add, div = (f"{name}.rn.{f}" for name in ("fma", "mul", "add", "div"))
    CASES |= {
        f"sum {kind}": Case("weighted_sum", _of(kind, SUMMED), {**SUM, "ACC": wide}, (fma, mul)),
        f"mean {kind}": Case("weighted_sum", _of(kind, SUMMED), {**MEAN, "ACC": wide}, (add, div)),
        f"average {kind}": Case("reduction", _of(kind, REDUCED), {**REDUCTION, "ACC": wide}, (add, div)),
        f"least {kind}": Case("reduction", _of(kind, REDUCED), {**REDUCTION, "HOW": "min", "ACC": wide}, ()),
    }


def launched(program: Any) -> list[str]:
    """What Triton makes of numbers that a program is started with, of those whose types it says."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    bind = create_function_from_signature(
        program.signature, program.params, CUDABackend(GPUTarget("cuda", ARCHITECTURE, 32))
    )
    tensor = torch.empty(64)
    samples = {"fp64": 0.1, "i64": 1 << 20}
    given = {param.name: 1 if param.is_constexpr else samples.get(param.annotation, tensor) for param in program.params}
    _, specialization, _ = bind(**given)
    return [result[0] for one, result in zip(program.params, specialization, strict=False) if one.annotation in samples]


def instructions(case: Case) -> dict[str, Any]:
    """Of one case: its instructions, whether the assembler accepted them, and the instructions that compute indices in
    32 bits."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from shoal.kernels import programs

    program = getattr(programs, case.program)
    language = {"fp32": tl.float32, "fp64": tl.float64}
    constants = {name: language.get(value, value) for name, value in case.constants.items()}
    signature = {}
    for name in program.arg_names:
        annotated = program.signature.parameters[name].annotation
        signature[name] = "constexpr" if name in constants else case.types.get(name, annotated)
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, name in enumerate(program.arg_names) if name in case.types
    }
    source = ASTSource(program, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(
        source, target=GPUTarget("cuda", ARCHITECTURE, 32), options={"enable_fp_fusion": False, "num_warps": 4}
    )
    text = re.sub(r"//.*", "", made.asm["ptx"])
    operations = made.asm["ttir"].splitlines()
    return {
        "declared": [param.annotation for param in program.params if param.annotation in ("fp64", "i64")],
        "launched": launched(program),
        "narrow": [
            line
            for line in operations
            if ("tt.addptr" in line and "i64" not in line) or re.search(r"arith\.(muli|addi|shli) .*: i32 loc", line)
        ],
        "instructions": sorted(set(re.findall(r"^\s*(?:@!?%\w+ )?([a-z]\w*(?:[.:]+\w+)+)", text, re.MULTILINE))),
        "cubin": bool(made.asm.get("cubin")),
    }


def main() -> int:
    """All cases as JSON; status 3 where Triton cannot compile for a device that is not there."""
    try:
        import triton.backends.nvidia.compiler  # noqa: F401
    except ImportError as error:
        print(f"Triton does not compile for NVIDIA's devices here: {error}", file=sys.stderr)
        return 3
    print(json.dumps({name: instructions(case) for name, case in CASES.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

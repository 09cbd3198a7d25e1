"""Compiles Triton and Gluon kernels for sm_90a without a GPU and reads what came out: registers, spills, instructions.

`recorded_launches` runs an op on meta tensors of the real model's shapes and notes what it would launch, so that the
checked kernel has the argument types, constants and options that the op really uses.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, mangle_type

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_TARGET = GPUTarget("cuda", 90, 32)
_ALIGNMENT = 16  # bytes, or a multiple of an integer argument: what Triton specialises launches for
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")


@dataclass(frozen=True)
class Sm90aKernel:
    """One kernel compiled for sm_90a."""

    name: str
    ptx: str
    cubin: bytes
    shared_bytes: int  # dynamic shared memory of one program
    ttgir: str  # Triton's last form, with the layouts of tensors

    @cached_property
    def sass(self) -> str:
        return self._disassemble("--dump-sass")

    @cached_property
    def _resources(self) -> dict[str, int]:
        fields = re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", self._disassemble("--dump-resource-usage"))
        return {name: int(value) for name, value in fields}

    @property
    def registers(self) -> int:
        """Per thread."""
        return self._resources["REG"]

    @property
    def spill_bytes(self) -> int:
        """Stack and local memory of one thread."""
        return self._resources["STACK"] + self._resources["LOCAL"]

    def assert_no_spills(self) -> None:
        """No instruction goes to local memory; LLVM may leave a frame of a few bytes that none touches."""
        spills = self.count(r"\b(LDL|STL)\b")
        assert spills == 0, f"{self.name}: {spills} spills, {self.spill_bytes} bytes, {self.registers} registers"

    def assert_tensor_core(self, instruction: str) -> None:
        """instruction: "QGMMA" (FP8) or "HGMMA" (bf16)."""
        assert instruction in ("QGMMA", "HGMMA"), instruction
        assert instruction in self.sass, f"{self.name}: no {instruction}"
        assert not re.search(r"\b[HIQ]MMA\.", self.sass), f"{self.name}: products on the older tensor-core path"

    def assert_128bit_loads(self) -> None:
        """At least one global load, or asynchronous copy, is 16 bytes wide."""
        assert self.count(r"\b(LDG|LDGSTS)\S*\.128\b|UTMALDG|UBLKCP"), f"{self.name}: no 16-byte loads"

    def assert_lanes_run_along_rows(self) -> None:
        """In loads and stores of two-dimensional tensors neighbouring lanes hold neighbouring columns."""
        order = dict(re.findall(r"(#\w+) = #ttg\.blocked<.*order = \[(\d)", self.ttgir))
        accesses = re.findall(r"tt\.(?:load|store) .*: tensor<\d+x(\d+)x!tt\.ptr<\w+>, (#\w+)>", self.ttgir)
        assert accesses, f"{self.name}: no loads or stores of two dimensions"
        across = [width for width, layout in accesses if int(width) > 1 and order[layout] == "0"]
        assert not across, f"{self.name}: lanes run over rows in accesses of {', '.join(across)} columns"

    def count(self, pattern: str) -> int:
        """Instructions whose text matches the regular expression."""
        return len(re.findall(pattern, self.sass))

    def hot_loop(self) -> list[str]:
        """Instructions of the longest loop body; empty without a loop."""
        lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", self.sass)
        index_of = {int(address, 16): i for i, (address, _) in enumerate(lines)}
        longest: list[str] = []
        for i, (address, text) in enumerate(lines):
            branch = re.search(r"BRA\S*\s+.*?0x([0-9a-f]+)", text)
            if branch and int(branch[1], 16) < int(address, 16):
                body = [text for _, text in lines[index_of[int(branch[1], 16)] : i + 1]]
                longest = max(longest, body, key=len)
        return longest

    def _disassemble(self, option: str) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.cubin)
            file.flush()
            command = [str(_TOOLS / "cuobjdump"), option, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compile_sm90a(
    kernel: JITFunction,
    signature: dict[str, str],
    constexprs: dict[str, Any],
    *,
    aligned: tuple[str, ...] | None = None,
    **options: Any,
) -> Sm90aKernel:
    """Compile for sm_90a; Triton's cache directory (a session's, see tests/kernels/conftest.py) keeps the result.

    signature: type of every argument as Triton writes them ("*bf16", "i32", "constexpr"). constexprs: their values.
    aligned: arguments that are multiples of 16; default all pointers. Without it loads become one byte wide.
    options: num_warps, num_stages, maxnreg, launch_pdl.
    """
    if aligned is None:
        aligned = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    names = list(signature)
    attrs = {(names.index(name),): [["tt.divisibility", _ALIGNMENT]] for name in aligned}
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    built = triton.compile(source, target=_TARGET, options=options)
    return Sm90aKernel(
        kernel.fn.__name__, built.asm["ptx"], built.asm["cubin"], built.metadata.shared, built.asm["ttgir"]
    )


@dataclass(frozen=True)
class Launch:
    """One recorded launch of a kernel."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    grid: tuple[int, ...] = ()

    def compile(self) -> Sm90aKernel:
        """As Triton would specialise this launch: 16-aligned pointers and integers, integers equal to 1 folded."""
        signature: dict[str, str] = {}
        constexprs: dict[str, Any] = {}
        aligned = []
        for param in self.kernel.params:
            value = self.arguments[param.name]
            is_one = isinstance(value, int) and value == 1 and not param.do_not_specialize
            if param.is_constexpr or value is None or (is_one and not isinstance(value, bool)):
                signature[param.name], constexprs[param.name] = "constexpr", value
                continue
            signature[param.name] = mangle_type(value)
            is_pointer = hasattr(value, "data_ptr")
            if is_pointer or (isinstance(value, int) and value % _ALIGNMENT == 0 and not param.do_not_specialize):
                aligned.append(param.name)
        return compile_sm90a(self.kernel, signature, constexprs, aligned=tuple(aligned), **self.options)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Launches inside are noted and do nothing; tensors may be on the meta device."""
    launches: list[Launch] = []
    stock_run = JITFunction.run

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: value for name, value in kwargs.items() if name in _OPTIONS}
        passed = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
        bound = kernel.signature.bind(*args, **passed)
        bound.apply_defaults()
        sizes = tuple(grid(bound.arguments) if callable(grid) else grid)
        launches.append(Launch(kernel, dict(bound.arguments), options, sizes))

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = stock_run

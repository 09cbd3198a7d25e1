"""Runs the Triton kernels of `dsv4_kernels` on CPU tensors: Triton 3.6's interpreter with its number faults corrected.

The interpreter as shipped truncates fp32 to bf16, mis-rounds fp32 to e4m3, computes bf16 arithmetic on raw integers and
can be chosen only by an environment variable for the whole process. Here a kernel stays the object that `triton.jit`
made; inside `interpreted()` a launch of it, and a call of one device function by another, runs its Python source.
`tl.dot_scaled` and inline assembly stay unsupported: such kernels carry an arithmetic branch under a constexpr.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.jit import JITFunction

_SUPPORTED_RELEASE = "3.6."
_NUMPY_TYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "fp8e5": ml_dtypes.float8_e5m2,
    "fp16": np.float16,
    "fp32": np.float32,
    "fp64": np.float64,
}
_SATURATE_AT = {"fp8e4nv": 448.0, "fp8e5": 57344.0}  # float8 casts saturate, as torch's and the GPU's do
_NARROW = ("bf16", "fp8e4nv", "fp8e5")

_stock_cast = interpreter.InterpreterBuilder.cast_impl
_stock_binary = interpreter.InterpreterBuilder.binary_op


@contextmanager
def interpreted() -> Iterator[None]:
    """Launches of Triton kernels run in the interpreter on the CPU tensors they are given.

    Raises: ImportError on a Triton release whose interpreter this was not written for.
    """
    if not triton.__version__.startswith(_SUPPORTED_RELEASE):
        raise ImportError(f"interpreter corrections are for triton {_SUPPORTED_RELEASE}x, found {triton.__version__}")
    scope = interpreter._LangPatchScope()
    scope.set_attr(JITFunction, "run", _launch)
    scope.set_attr(JITFunction, "__call__", lambda self, *args, **kwargs: _rewritten(self.fn)(*args, **kwargs))
    scope.set_attr(interpreter, "_convert_float", _convert)
    scope.set_attr(interpreter.InterpreterBuilder, "create_dot", _create_dot)
    scope.set_attr(interpreter.InterpreterBuilder, "cast_impl", _cast)
    scope.set_attr(interpreter.InterpreterBuilder, "binary_op", _binary)
    try:
        yield
    finally:
        scope.restore()


def _launch(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Every program of the grid, one after the other, in place of `JITFunction.run`."""
    fn = _rewritten(kernel.fn)
    kwargs = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    bound = kernel.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    values = {
        name: value if kernel.params[i].is_constexpr else interpreter._implicit_cvt(value)
        for i, (name, value) in enumerate(bound.arguments.items())
    }
    sizes = tuple(grid(bound.arguments) if callable(grid) else grid)
    sizes += (1,) * (3 - len(sizes))
    builder = interpreter.interpreter_builder
    scope = _interpreted_language()
    try:
        builder.set_grid_dim(*sizes)
        with np.errstate(all="ignore"):  # integers wrap and floats overflow silently, as on the GPU
            for program in product(*map(range, sizes)):
                builder.set_grid_idx(*program)
                fn(**values)
    finally:
        scope.restore()


def _interpreted_language() -> Any:
    """Triton's language functions with their interpreted meaning, until the scope is restored."""
    scope = interpreter._LangPatchScope()
    for language in (tl, tl.core):
        interpreter._patch_builtin(language, interpreter.interpreter_builder, scope)
        interpreter._patch_lang_core(language, scope)
    interpreter._patch_builtin(tl.math, interpreter.interpreter_builder, scope)
    interpreter._patch_builtin(tl.tensor, interpreter.interpreter_builder, scope)
    interpreter._patch_builtin(tl.core.tensor_descriptor_base, interpreter.interpreter_builder, scope)
    interpreter._patch_lang_tensor(tl.tensor, scope)
    scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))  # scalars are arrays of one value
    return scope


class _Rewriter(interpreter.FunctionRewriter):
    def _compile_and_exec(self, transformed_ast: Any) -> Callable[..., Any]:
        """Runs in a copy of the kernel's module namespace, so that the module stays as it is."""
        namespace = {**vars(interpreter), **self.fn.__globals__}
        exec(compile(transformed_ast, self.filename, "exec"), namespace)
        return namespace[self.fn.__name__]


@cache
def _rewritten(fn: Callable[..., Any]) -> Callable[..., Any]:
    return _Rewriter(fn).rewrite_ast()


def _convert(raw: np.ndarray, src: Any, dst: Any, rounding: Any = None) -> np.ndarray:
    """Bits of type src to bits of type dst, round to nearest even, float8 saturating as torch does."""
    is_wide = str(src) in ("fp32", "fp64")
    values = raw if is_wide else np.ascontiguousarray(raw).view(_NUMPY_TYPES[str(src)]).astype(np.float32)
    if str(dst) in _SATURATE_AT:
        values = np.clip(values, -_SATURATE_AT[str(dst)], _SATURATE_AT[str(dst)])
    return values.astype(_NUMPY_TYPES[str(dst)]).view(getattr(np, f"uint{dst.primitive_bitwidth}"))


def _as_float(handle: Any) -> np.ndarray:
    """The handle's data as fp32, integers as int32."""
    scalar = handle.dtype.scalar
    if str(scalar) in _NUMPY_TYPES:
        return np.ascontiguousarray(handle.data).view(_NUMPY_TYPES[str(scalar)]).astype(np.float32)
    return handle.data.astype(np.int32 if scalar.is_int() else np.float32)


def _create_dot(self: Any, a: Any, b: Any, acc: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    product_ = np.matmul(_as_float(a), _as_float(b)).astype(acc.data.dtype)
    return interpreter.TensorHandle(product_ + acc.data, acc.dtype.scalar)


def _cast(self: Any, src: Any, dst_type: Any) -> Any:
    src_type, dst = src.dtype.scalar, dst_type.scalar
    as_dst = interpreter._get_np_dtype(dst_type)
    if src_type.is_floating() and dst.is_floating():
        return interpreter.TensorHandle(_convert(src.data, src_type, dst).view(as_dst), dst)
    if str(src_type) in _NARROW:
        return interpreter.TensorHandle(_as_float(src).astype(as_dst), dst)
    if str(dst) in _NARROW:
        return interpreter.TensorHandle(_convert(src.data.astype(np.float32), tl.float32, dst).view(as_dst), dst)
    return _stock_cast(self, src, dst_type)


def _binary(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
    scalar = lhs.dtype.scalar
    if str(scalar) not in _NARROW:
        return _stock_binary(self, lhs, rhs, op)
    result = op(_as_float(lhs), _as_float(rhs)).astype(np.float32)
    return interpreter.TensorHandle(_convert(result, tl.float32, scalar).view(lhs.data.dtype), scalar)

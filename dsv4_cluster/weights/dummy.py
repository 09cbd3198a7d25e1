"""Random weights of a given shape that exercise every path of the model.

Each tensor depends only on (seed, name), so any part can be made alone and in any order. Magnitudes keep activations
near one and let every branch move the logits: sinks, ape, gate biases, hyper-connections and compressor gates are all
far from neutral, and scales differ between neighbouring blocks, so that a wrong one shows. Quantised weights are made
of their stored codes; values times power-of-two scales are exact in bf16, so a bf16 copy holds the same numbers.
"""

import hashlib
import math
import re
from dataclasses import dataclass

import torch

from dsv4_cluster.weights.formats import dequantise
from dsv4_cluster.weights.inventory import TensorSpec, scale_name_of

_E8M0_BIAS = 127
_FP8_STD = 32.0  # e4m3 codes get a deviation of 32 to 64: full precision, and 7 deviations below the maximum of 448
_FP4_RMS = math.sqrt(8.5625)  # root mean square of uniformly drawn E2M1 codes: mean of 0, .25, 1, 2.25, 4, 9, 16, 36
_SCALE_STEPS = (-1, 0, 1)  # exponents of neighbouring scales differ
_SCALE_RMS = math.sqrt((0.25 + 1.0 + 4.0) / 3)  # what those steps do to the deviation


@dataclass(frozen=True, slots=True)
class _Normal:
    """Values mean + std * normal; `by_fan_in` divides std by the square root of the input width."""

    std: float
    mean: float = 0.0
    by_fan_in: bool = False


# First match wins. Deviations were chosen with the activations near one throughout and a logit deviation near 2.5.
_RULES: tuple[tuple[str, _Normal], ...] = (
    (r"embed\.weight", _Normal(1.0)),
    (r"head\.weight", _Normal(2.5, by_fan_in=True)),
    (r"attn\.(kv_norm|compressor\.norm)\.weight", _Normal(0.2, mean=1.5)),  # a peaked softmax
    (r"norm\.weight$", _Normal(0.2, mean=1.0)),
    (r"hc_\w+_fn$", _Normal(1.0, by_fan_in=True)),
    (r"hc_\w+_base$", _Normal(1.5)),  # streams mix unevenly and stay different
    (r"hc_\w+_scale$", _Normal(0.15, mean=0.8)),
    (r"attn_sink$", _Normal(1.0, mean=2.0)),
    (r"\.ape$", _Normal(1.0)),
    (r"compressor\.wgate\.weight", _Normal(1.5, by_fan_in=True)),
    (r"gate\.bias$", _Normal(0.3)),
    (r"gate\.weight", _Normal(1.5, by_fan_in=True)),
    (r"\.wo_b\.weight", _Normal(1.5, by_fan_in=True)),
    (r"\.experts\.\d+\.w2\.weight", _Normal(2.0, by_fan_in=True)),
    (r"\.weight$", _Normal(1.0, by_fan_in=True)),
)


def dummy_tensor(spec: TensorSpec, seed: int) -> torch.Tensor:
    """One tensor of the inventory as stored. Returns: `spec.shape` of the stored dtype, on CPU."""
    generator = torch.Generator().manual_seed(_tensor_seed(seed, spec.name))
    if spec.scale_of is not None:
        return _scales(spec, generator)
    if spec.dtype == "I8":
        return _random_bytes(spec.shape, generator).view(torch.int8)
    if spec.dtype == "I64":
        return _expert_table(spec, generator)
    rule = _rule(spec.name)
    if spec.dtype == "F8_E4M3":
        _, std = _fp8_split(spec)
        return (torch.randn(spec.shape, generator=generator) * std).to(torch.float8_e4m3fn)
    values = torch.randn(spec.shape, generator=generator).mul_(_std(rule, spec)).add_(rule.mean).to(torch.bfloat16)
    return values if spec.dtype == "BF16" else values.float()  # fp32 parameters survive a bf16 round trip as well


def dummy_plain(spec: TensorSpec, specs: dict[str, TensorSpec], seed: int) -> torch.Tensor:
    """The same weight for a bf16-only checkpoint: dequantised to bf16; fp32 and integer tensors as they are."""
    stored = dummy_tensor(spec, seed)
    if spec.scale_block is None:
        return stored
    return dequantise(stored, dummy_tensor(specs[scale_name_of(spec.name)], seed), torch.bfloat16)


def _tensor_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "little")


def _rule(name: str) -> _Normal:
    for pattern, rule in _RULES:
        if re.search(pattern, name):
            return rule
    raise AssertionError(f"no rule for tensor {name}")


def _std(rule: _Normal, spec: TensorSpec) -> float:
    return rule.std / math.sqrt(spec.logical_shape[-1]) if rule.by_fan_in else rule.std


def _fp8_split(spec: TensorSpec) -> tuple[int, float]:
    """Split the wanted deviation into a scale exponent and a deviation of the codes in [32, 64)."""
    weight_name = spec.scale_of or spec.name
    wanted = _std(_rule(weight_name), spec) / _SCALE_RMS
    exponent = math.floor(math.log2(wanted / _FP8_STD))
    return exponent, wanted / 2.0**exponent


def _scales(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    assert spec.scale_of is not None, spec
    if spec.granule[0] == 1:  # MXFP4: the codes are uniform, so all of the deviation is in the scale
        exponent = round(math.log2(_std(_rule(spec.scale_of), spec) / _SCALE_RMS / _FP4_RMS))
    else:
        exponent, _ = _fp8_split(spec)
    steps = torch.randint(_SCALE_STEPS[0], _SCALE_STEPS[-1] + 1, spec.shape, generator=generator)
    return (steps + exponent + _E8M0_BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)


def _random_bytes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Uniform bytes, drawn eight at a time."""
    count = math.prod(shape)
    words = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[:count].reshape(shape)


def _expert_table(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Distinct experts per token id: the first columns of a random order of all experts."""
    vocab_size, num_picks = spec.shape
    keys = torch.rand((vocab_size, spec.num_experts), generator=generator)
    return keys.topk(num_picks, dim=1, sorted=False).indices

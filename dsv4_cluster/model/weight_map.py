"""Fill a model from a checkpoint: parameter names are checkpoint names, shard rules come from the inventory.

Weights are dequantised to the parameter's dtype while loading; activation quantisation is not simulated. Parameters
that stay fp32 whatever the compute dtype (spec 3.6) are created as fp32 by their layers. Source: spec 2.1, 2.4.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from dsv4_cluster.errors import CheckpointError
from dsv4_cluster.model.compressor import Compressor
from dsv4_cluster.model.linear import GroupedLinear, Linear
from dsv4_cluster.model.moe_layer import SharedExpert
from dsv4_cluster.moe.experts import Experts
from dsv4_cluster.parallel.state import ParallelState
from dsv4_cluster.weights.inventory import TensorSpec, inventory
from dsv4_cluster.weights.reader import Checkpoint

_STACKED = (".experts.w1", ".experts.w2", ".experts.w3")  # routed experts are held as one parameter per matrix


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """One checkpoint tensor, or the slice of it that this rank owns, and where it goes."""

    name: str  # official
    index: tuple[slice, ...]  # of the logical tensor
    target: torch.Tensor  # view of the parameter


def load_packed(model: nn.Module, checkpoint: Checkpoint, parallel: ParallelState, *, prefix: str = "") -> None:
    """`load_weights`, then `pack_weights`, with no more than one layer's routed experts unpacked at a time."""
    done: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            load_weights(module, checkpoint, parallel, prefix=f"{prefix}{name}.")
            module.pack()
            done.update(f"{name}.{parameter}" for parameter, _ in module.named_parameters())
    load_weights(model, checkpoint, parallel, prefix=prefix, done=done)
    pack_weights(model)


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    parallel: ParallelState,
    *,
    prefix: str = "",
    done: Collection[str] = (),
) -> None:
    """Fill every parameter of `model` but those in `done`, reading only the slices that this rank owns.

    prefix: of the checkpoint names, "mtp.0." for the first MTP module.
    Raises: CheckpointError when a tensor is absent or does not fit, or a token's table names an expert that is not
        there; ConfigError when the split does not divide a tensor.
    """
    specs = inventory(checkpoint.config)
    for part in parameter_parts(model, specs, parallel, prefix=prefix, done=done):
        values = checkpoint.read(part.name, part.index, dtype=part.target.dtype)
        if specs[part.name].dtype == "I64":
            _check_expert_ids(part.name, values, specs[part.name].num_experts)
        part.target.copy_(values)


def pack_weights(model: nn.Module) -> None:
    """Lay loaded weights out for the CPU kernels, in place; where those do not exist nothing changes.

    Packed parameters hold their values in another order or format: load first, pack last.
    """
    done: set[nn.Module] = set()
    for module in model.modules():  # parents first: a packed group of layers packs its members itself
        if isinstance(module, Experts | SharedExpert | Compressor):
            if not (isinstance(module, Experts) and module.packed is not None):
                module.pack()
            done.update(module.modules())
        elif isinstance(module, Linear | GroupedLinear) and module not in done:
            module.pack()


def parameter_parts(
    model: nn.Module,
    specs: Mapping[str, TensorSpec],
    parallel: ParallelState,
    *,
    prefix: str = "",
    done: Collection[str] = (),
) -> Iterator[ParameterPart]:
    """Where every value of the model's parameters comes from; each parameter not in `done` is covered exactly once.

    Raises: CheckpointError when the inventory lacks a name or its shape differs; ConfigError as `load_weights`.
    """
    for name, parameter in model.named_parameters():
        if name in done:
            continue
        for official, target in _targets(prefix + name, parameter.detach(), specs, parallel):
            spec = _spec(specs, official)
            index = _owned_index(spec, parallel)
            assert index is not None, official
            shape = tuple(part.stop - part.start for part in index)
            if shape != tuple(target.shape):
                raise CheckpointError(f"{official}: this rank's part is {shape}, model has {tuple(target.shape)}")
            yield ParameterPart(official, index, target)


def _targets(
    name: str, values: torch.Tensor, specs: Mapping[str, TensorSpec], parallel: ParallelState
) -> Iterator[tuple[str, torch.Tensor]]:
    """(official name, tensor to fill) of one parameter."""
    if not name.endswith(_STACKED):
        yield name, values
        return
    stem, matrix = name.rsplit(".", 1)
    num_experts = _spec(specs, f"{stem}.0.{matrix}.weight").num_experts
    owned = [
        official
        for official in (f"{stem}.{expert_id}.{matrix}.weight" for expert_id in range(num_experts))
        if _owned_index(_spec(specs, official), parallel) is not None
    ]
    if len(owned) != values.shape[0]:
        raise CheckpointError(f"{name}: this rank owns {len(owned)} experts, model has {values.shape[0]}")
    yield from zip(owned, values.unbind(0), strict=True)


def _check_expert_ids(name: str, table: torch.Tensor, num_experts: int) -> None:
    """Routing indexes with these ids. Raises: CheckpointError with the place of the first one out of range."""
    is_wrong = (table < 0) | (table >= num_experts)
    if is_wrong.any():
        token_id, column = is_wrong.nonzero()[0].tolist()
        raise CheckpointError(
            f"tensor {name} {list(table.shape)} holds expert {int(table[token_id, column])} for token {token_id}, "
            f"the model has {num_experts} experts"
        )


def _owned_index(spec: TensorSpec, parallel: ParallelState) -> tuple[slice, ...] | None:
    return spec.owned_index(
        tp_rank=parallel.tp_rank, tp_size=parallel.tp_size, ep_rank=parallel.ep_rank, ep_size=parallel.ep_size
    )


def _spec(specs: Mapping[str, TensorSpec], name: str) -> TensorSpec:
    spec = specs.get(name)
    if spec is None:
        raise CheckpointError(f"{name}: the model has this parameter, but the checkpoint format of its config does not")
    return spec

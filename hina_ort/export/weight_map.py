"""Which tensors of a checkpoint make each parameter of a transformers model, by transformers' own rules.

Names differ between checkpoints and modules, and some parameters are merged of several tensors: experts that lie one by
one are stacked, gate and up projections concatenated. `transformers.conversion_mapping` holds the rules. Here they are
followed for names alone, so that experts stay where they lie; what has to be computed is computed when it is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graph_passes.external_data import ModelFileError
from hina_ort.export.shards import Checkpoint, StoredTensor

_MXFP4_PARTS = ("_blocks", "_scales")


@dataclass(frozen=True)
class Source:
    """What a parameter is made of: `tensors` of the checkpoint by the pattern that found them, and how.

    Without a `converter` (a WeightConverter of transformers) it is the one tensor itself.
    """

    name: str
    shape: tuple[int, ...]
    tensors: dict[str, list[StoredTensor]]
    converter: Any = None
    model: Any = None

    @property
    def stored(self) -> StoredTensor | None:
        """The tensor that is the parameter as it lies, if there is one."""
        (first, *others), *more = self.tensors.values()
        return None if self.converter is not None or others or more else first

    @property
    def dtype(self) -> ir.DataType:
        """The type that it has in the checkpoint."""
        return next(iter(self.tensors.values()))[0].dtype

    def tensor(self) -> ir.TensorProtocol:
        """The parameter, in the type of the checkpoint, to be read or computed later; shapes are checked then."""
        stored = self.stored
        if stored is not None and stored.shape == self.shape:
            return stored.tensor()
        shape = ir.Shape(self.shape)
        return ir.LazyTensor(lambda: ir.Tensor(self.numpy(), dtype=self.dtype), self.dtype, shape, name=self.name)

    def numpy(self) -> npt.NDArray[Any]:
        """The parameter, in the type of the checkpoint; ModelFileError when its shape is not that of the model."""
        stored = self.stored
        array = self._converted() if stored is None else stored.tensor().numpy()
        if array.shape != self.shape and array.size != np.prod(self.shape):
            first = next(iter(self.tensors.values()))[0]
            raise ModelFileError(
                f"{first.file}: {first.name} has the shape {list(array.shape)}, config.json asks for "
                f"{list(self.shape)} ({self.name}); the files belong to different models"
            )
        return array.reshape(self.shape)

    def experts(self) -> list[list[StoredTensor]] | None:
        """Per-expert tensors, when that is what the checkpoint has: one list for each tensor merged into an expert.

        That is [gate projections, up projections] of a merged pair, else [projections]; expert 0 first.
        """
        operations = [type(op).__name__ for op in getattr(self.converter, "operations", ())]
        dims = [getattr(op, "dim", None) for op in getattr(self.converter, "operations", ())]
        parts = [self.tensors[name] for name in getattr(self.converter, "source_patterns", ()) if name in self.tensors]
        if (operations, dims, len(parts)) == (["MergeModulelist"], [0], 1):
            return parts
        if (operations, dims, len(parts)) == (["MergeModulelist", "Concatenate"], [0, 1], 2):
            return parts
        return None

    def mxfp4(self) -> tuple[StoredTensor, StoredTensor] | None:
        """Blocks `[E, N, K / 32, 16]` and scales `[E, N, K / 32]` of MXFP4, when that is what the checkpoint has."""
        blocks, scales = (self.tensors.get(part) for part in _MXFP4_PARTS)
        return None if blocks is None or scales is None else (blocks[0], scales[0])

    def _converted(self) -> npt.NDArray[Any]:
        import torch

        converter = deepcopy(self.converter)
        for pattern, tensors in self.tensors.items():
            for tensor in tensors:
                converter.add_tensor(self.name, tensor.name, pattern, _to_torch(tensor.tensor().numpy()))
        with torch.no_grad():
            found = converter.convert(self.name, model=self.model, config=self.model.config)[self.name]
        value = found[0] if isinstance(found, list) else found
        return _from_torch(value)


def sources(model: Any, checkpoint: Checkpoint) -> dict[str, Source]:
    """The source of every parameter and persistent buffer of `model`, which may be on the meta device.

    Tensors that the model has no use for are left out. ModelFileError, naming it, for one that the checkpoint lacks.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    prefix: str = model.base_model_prefix
    found: dict[str, Source] = {}
    for key in sorted(checkpoint.tensors, key=dot_natural_key):
        tensor = checkpoint.tensors[key]
        base, part = _mxfp4_part(key)
        name, pattern = rename_source_key(base, renamings, converters, prefix, wanted)
        if name not in wanted and base in wanted:
            name, pattern = rename_source_key(base, [], [], prefix, wanted)
        if name not in wanted:
            continue
        new = Source(name, wanted[name], {}, by_pattern.get(pattern or ""), model)
        source = found.setdefault(name, new)
        source.tensors.setdefault(part or pattern or "", []).append(tensor)
    for source in list(found.values()):
        found |= {name: other for name, other in _siblings(source, wanted)}
    _add_tied(model, found)
    if missing := [name for name in wanted if name not in found and not _may_be_missing(model, name)]:
        raise ModelFileError(
            f"{checkpoint.folder} holds no tensor for {missing[0]} ({len(missing)} of {len(wanted)} parameters are "
            "missing); download the checkpoint again"
        )
    for source in found.values():
        _check_experts(source, checkpoint)
    return found


def _check_experts(source: Source, checkpoint: Checkpoint) -> None:
    """ModelFileError unless experts that lie one by one are as many and as large as the parameter `[E, N, K]`."""
    lists = source.experts()
    for tensors in lists or ():
        first = tensors[0]
        if len(tensors) != source.shape[0]:
            raise ModelFileError(
                f"{checkpoint.folder} holds {len(tensors)} tensors like {first.name} and config.json asks for "
                f"{source.shape[0]} experts; download the checkpoint again"
            )
        rows, *columns = source.shape[1:]
        expected = (rows // len(lists or ()), *columns)
        if wrong := next((tensor for tensor in tensors if tensor.shape != expected), None):
            raise ModelFileError(
                f"{wrong.file}: {wrong.name} has the shape {list(wrong.shape)}, config.json asks for {list(expected)}; "
                "the files belong to different models"
            )


def _mxfp4_part(key: str) -> tuple[str, str]:
    """The name of the parameter that `key` is a part of, and which part; `key` itself where it is none."""
    for part in _MXFP4_PARTS:
        if key.endswith(f"_proj{part}"):
            return key.removesuffix(part), part
    return key, ""


def _siblings(source: Source, wanted: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Source]]:
    """The other parameters that the converter of `source` makes of the same tensors."""
    targets: list[str] = getattr(source.converter, "target_patterns", [])
    for target in targets[1:]:
        name = source.name.replace(targets[0], target)
        if name in wanted:
            yield name, Source(name, wanted[name], source.tensors, source.converter, source.model)


def _add_tied(model: Any, found: dict[str, Source]) -> None:
    """Give parameters that are one with another (a head with the embeddings) the source of that."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for same in names.values():
        for known in [found[name] for name in same if name in found][:1]:
            found |= {name: known for name in same if name not in found}


def _may_be_missing(model: Any, name: str) -> bool:
    patterns = model._keys_to_ignore_on_load_missing or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _to_torch(array: npt.NDArray[Any]) -> Any:
    import torch

    array = np.array(array)  # torch wants memory that may be written
    if array.dtype == ir.DataType.BFLOAT16.numpy():
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _from_torch(value: Any) -> npt.NDArray[Any]:
    import torch

    value = value.contiguous()
    bits = value.dtype == torch.bfloat16  # which NumPy lacks
    array: npt.NDArray[Any] = (value.view(torch.uint16) if bits else value).numpy()
    return array.view(ir.DataType.BFLOAT16.numpy()) if bits else array

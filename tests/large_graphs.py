"""A model as optimum-onnx exports Qwen3-MoE with many experts: tens of nodes for each, small constants among them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HIDDEN, INTER, TOP_K = 16, 8, 2

_BEFORE = """
n0 = ReduceMean<keepdims = 1>(x, last)
n1 = Sub(x, n0)
n2 = MatMul(n1, attention)
hidden = Tanh(n2)
s0 = Shape(hidden)
i0 = Constant<value = int64 {0}>()
size0 = Gather<axis = 0>(s0, i0)
s1 = Shape(hidden)
i1 = Constant<value = int64 {1}>()
size1 = Gather<axis = 0>(s1, i1)
s2 = Shape(hidden)
i2 = Constant<value = int64 {2}>()
width = Gather<axis = 0>(s2, i2)
u0 = Unsqueeze(width, zero)
minus = Constant<value = int64[1] {-1}>()
rows = Concat<axis = 0>(minus, u0)
flat = Reshape<allowzero = 0>(hidden, rows)
logits = MatMul(flat, router)
scores = Softmax<axis = 1>(logits)
scores1 = Cast<to = 1>(scores)
k = Constant<value = int64[1] {TOP_K}>()
values, ids = TopK<axis = -1, largest = 1, sorted = 1>(scores1, k)
sum = ReduceSum<keepdims = 1>(values, last)
mixing0 = Div(values, sum)
mixing = Cast<to = 1>(mixing0)
tokens = Mul(size0, size1)
u1 = Unsqueeze(tokens, zero)
u2 = Unsqueeze(width, zero)
total = Concat<axis = 0>(u1, u2)
acc0 = ConstantOfShape<value = float[1] {0.0}>(total)
depth = Constant<value = int64 {EXPERTS}>()
off_on = Constant<value = int64[2] {0, 1}>()
hot = OneHot<axis = -1>(ids, depth, off_on)
mask = Transpose<perm = [2, 1, 0]>(hot)
front = Unsqueeze(flat, zero)
"""
_EXPERT = """
a_u = Unsqueeze(width, zero)
a_minus = Constant<value = int64[1] {-1}>()
a_rows = Concat<axis = 0>(a_minus, a_u)
a_id = Constant<value = int64 {EXPERT}>()
a_row = Gather<axis = 0>(mask, a_id)
a_bool = Cast<to = 9>(a_row)
a_found = NonZero(a_bool)
a_pairs = Transpose<perm = [1, 0]>(a_found)
a_ones = Constant<value = int64[2] {1, 1}>()
a_s, a_t = Split<axis = 1>(a_pairs, a_ones)
a_axis0 = Constant<value = int64[1] {1}>()
a_slot = Squeeze(a_s, a_axis0)
a_axis1 = Constant<value = int64[1] {1}>()
a_token = Squeeze(a_t, a_axis1)
a_x0 = Gather<axis = 1>(front, a_token)
a_x = Reshape<allowzero = 0>(a_x0, a_rows)
a_g = MatMul(a_x, a_gate)
a_sg = Sigmoid(a_g)
a_act = Mul(a_g, a_sg)
a_up = MatMul(a_x, a_upw)
a_h = Mul(a_act, a_up)
a_d = MatMul(a_h, a_down)
a_axis2 = Constant<value = int64[1] {2}>()
a_m3 = Unsqueeze(mixing, a_axis2)
a_ms = Shape(a_m3)
a_one = Constant<value = int64[1] {1}>()
a_k = Gather<axis = 0>(a_ms, a_one)
a_two = Constant<value = int64[1] {2}>()
a_last = Gather<axis = 0>(a_ms, a_two)
a_mf = Flatten<axis = 2>(a_m3)
a_base = Mul(a_token, a_k)
a_at = Add(a_slot, a_base)
a_w0 = Gather<axis = 0>(a_mf, a_at)
a_as = Shape(a_at)
a_minus1 = Constant<value = int64[1] {-1}>()
a_to0 = Concat<axis = 0>(a_minus1, a_last)
a_w1 = Reshape<allowzero = 0>(a_w0, a_to0)
a_to1 = Concat<axis = 0>(a_as, a_last)
a_w = Reshape<allowzero = 0>(a_w1, a_to1)
a_o0 = Mul(a_d, a_w)
a_o = Cast<to = 1>(a_o0)
a_starts = Constant<value = int64[2] {0, 0}>()
a_ends = Constant<value = int64[2] {1, 9223372036854775807}>()
a_axes = Constant<value = int64[2] {0, 1}>()
a_first = Slice(ACC, a_starts, a_ends, a_axes)
a_fs = Shape(a_first)
a_oe = Expand(a_o, a_fs)
a_axis3 = Constant<value = int64[1] {1}>()
a_t1 = Unsqueeze(a_token, a_axis3)
a_os = Shape(a_oe)
a_te = Expand(a_t1, a_os)
a_accs = Shape(ACC)
a_zeros = ConstantOfShape<value = float[1] {0.0}>(a_accs)
a_sc = ScatterElements<axis = 0>(a_zeros, a_te, a_oe)
NEXT = Add(ACC, a_sc)
"""
_AFTER = """
back0 = Unsqueeze(size0, zero)
back1 = Unsqueeze(size1, zero)
back2 = Unsqueeze(width, zero)
back = Concat<axis = 0>(back0, back1, back2)
moe = Reshape<allowzero = 0>(ACC, back)
y = Add(x, moe)
"""


def _layer(experts: int) -> onnx.GraphProto:
    """One layer x -> y."""
    lines = [_BEFORE.replace("TOP_K", str(TOP_K)).replace("EXPERTS", str(experts))]
    for e in range(experts):
        text = _EXPERT.replace("EXPERT", str(e)).replace("ACC", f"acc{e}").replace("NEXT", f"acc{e + 1}")
        lines.append(text.replace("a_", f"e{e}_"))
    lines.append(_AFTER.replace("ACC", f"acc{experts}"))
    shape = f"float[batch, sequence, {HIDDEN}]"
    return onnx.parser.parse_graph(f"layer ({shape} x) => ({shape} y) {{ {''.join(lines)} }}")


def _weights(experts: int, rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    shapes = {"router": (HIDDEN, experts), "attention": (HIDDEN, HIDDEN)}
    for e in range(experts):
        shapes |= {f"e{e}_gate": (HIDDEN, INTER), f"e{e}_upw": (HIDDEN, INTER), f"e{e}_down": (INTER, HIDDEN)}
    for name, shape in shapes.items():
        yield name, (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


def large_model(layers: int, experts: int) -> onnx.ModelProto:
    """`layers` of an attention-like part and a loop over `experts`, about 55 nodes for each expert."""
    rng = np.random.default_rng(0)
    one = _layer(experts)
    shape = ["batch", "sequence", HIDDEN]
    result = onnx.ModelProto(ir_version=8, graph=onnx.GraphProto(name="main_graph"))
    result.opset_import.append(helper.make_opsetid("", 18))
    graph = result.graph
    shared = {"last": np.array([-1]), "zero": np.array([0])}
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in shared.items())
    for index in range(layers):
        path = f"/model/layers.{index}/mlp"
        names = {**{name: name for name in shared}, "x": f"h{index}", "y": f"h{index + 1}"}
        for number, original in enumerate(one.node):
            node = graph.node.add()
            node.CopyFrom(original)
            node.name = f"{path}/{node.op_type}_{number}"
            for field in (node.input, node.output):
                field[:] = [names.setdefault(name, f"{path}/{name}") for name in field]
        for name, array in _weights(experts, rng):
            graph.initializer.append(numpy_helper.from_array(array, names[name]))
    graph.input.append(helper.make_tensor_value_info("h0", TensorProto.FLOAT, shape))
    graph.output.append(helper.make_tensor_value_info(f"h{layers}", TensorProto.FLOAT, shape))
    return result

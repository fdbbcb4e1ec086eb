"""MoE blocks that compute all experts for all tokens, as ONNX text: the two forms of exporters."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from tests.graphs import parse

# 2I is H on purpose: no shape tells gate_up_proj [E, H, 2I] from its transpose.
H, I, E, K = 16, 8, 4, 2  # noqa: E741
RNG = np.random.default_rng(3)


def random(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) * 0.6).astype(np.float32)


CONSTANTS: dict[str, np.ndarray] = {
    "router": random(E, H),
    "router_of_6": random(6, H),
    "router_b": random(E),
    "gate_up": random(E, H, 2 * I),
    "gate_up_nk": random(E, 2 * I, H),
    "gate": random(E, H, I),
    "up": random(E, H, I),
    "down": random(E, I, H),
    "down_of_3": random(3, I, H),
    "gate_up_b": random(E, 2 * I),
    "gate_up_b3": random(E, 1, 2 * I),
    "down_b": random(E, 1, H),
    "down_b_of_tokens": random(1, E, H),
    "k": np.array([K]),
    "by_h": np.array([-1, H]),
    "experts_first": np.array([E, -1, H]),
    "six_tokens": np.array([E, 6, H]),
    "column": np.array([-1, 1]),
    "copies": np.array([E, 1]),
    "copies_3d": np.array([E, 1, 1]),
    "copies_apart": np.array([1, E]),
    "twice": np.array([2 * E, 1]),
    "ones": np.array([1, 1]),
    "fixed_scores": np.zeros((6, E), np.float32),
    "fixed_shape": np.array([6, E]),
    "first": np.array(0),
    "second": np.array(1),
    "i0": np.array([0]),
    "i1": np.array([1]),
    "i2": np.array([2]),
    "i3": np.array([3]),
    "last": np.array([-1]),
    "h": np.array([H]),
    "end": np.array([2**63 - 1]),
    "alpha": np.float32(1.702),
    "limit": np.float32(0.5),
    "minus_limit": np.float32(-0.5),
    "one": np.float32(1.0),
    "zero": np.float32(0.0),
    "minus_inf": np.float32(-math.inf),
}

SIZES = (
    "xs = Shape(x) b = Gather(xs, first) bu = Unsqueeze(b, i0) ss = Shape(sc) e = Gather(ss, second) "
    "eu = Unsqueeze(e, i0)"
)
"""The sizes B and E as TorchScript computes them."""

GPT_OSS = {
    "tokens": "t = Reshape(x, by_h)",
    "router": "l = Gemm<transB = 1>(t, router, router_b) w0, ids = TopK(l, k) w = Softmax<axis = 1>(w0)",
    "scatter": "ls = Shape(l) fill = ConstantOfShape(ls) sc = ScatterElements<axis = 1>(fill, ids, w)",
    "copies": (
        f"{SIZES} counts = Concat<axis = 0>(eu, i1) cs = Shape(counts) "
        "cf = ConstantOfShape<value = int64[1] {1}>(cs) te = Expand(t, cf) tt = Tile(te, counts) "
        "target = Concat<axis = 0>(eu, last, h) r = Reshape(tt, target)"
    ),
    "gate_up": "p0 = MatMul(r, gate_up) p = Add(p0, gate_up_b3)",
    "activation": (
        "g = Slice(p, i0, end, i2, i2) u = Slice(p, i1, end, i2, i2) gc = Clip(g, , limit) "
        "uc = Clip(u, minus_limit, limit) gs = Mul(gc, alpha) sg = Sigmoid(gs) gl = Mul(gc, sg) u1 = Add(uc, one) "
        "a = Mul(u1, gl)"
    ),
    "down": "o0 = MatMul(a, down) o = Add(o0, down_b)",
    "weigh": (
        "o_target = Concat<axis = 0>(eu, bu, last, h) o4 = Reshape(o, o_target) st = Transpose<perm = [1, 0]>(sc) "
        "s_target = Concat<axis = 0>(eu, bu, last) s3 = Reshape(st, s_target) s4 = Unsqueeze(s3, i3) ow = Mul(o4, s4)"
    ),
    "sum": "y = ReduceSum<keepdims = 0>(ow, i0)",
    "after": "z = Neg(y)",
}
"""The block as optimum-onnx writes it, on x [B, S, H]."""

LLAMA4 = {
    "tokens": "t = Reshape(x, by_h)",
    "router": "l = Gemm<transB = 1>(t, router) w0, ids = TopK<axis = 1>(l, k)",
    "scatter": (
        "ls = Shape(l) fill = Expand(minus_inf, ls) raw = ScatterElements<axis = 1>(fill, ids, w0) sc = Sigmoid(raw)"
    ),
    "copies": (
        "te = Expand(t, ones) tt = Tile(te, copies) st = Transpose<perm = [1, 0]>(sc) sr = Reshape(st, column) "
        "tw = Mul(tt, sr) r = Reshape(tw, experts_first)"
    ),
    "gate_up": "p = MatMul(r, gate_up)",
    "activation": "g, u = Split<axis = 2, num_outputs = 2>(p) sg = Sigmoid(g) gl = Mul(g, sg) a = Mul(u, gl)",
    "down": "o0 = MatMul(a, down) o = Reshape(o0, experts_first)",
    "weigh": "",
    "sum": "y = ReduceSum<keepdims = 0>(o, i0)",
    "after": "sh = Tanh(t) z = Add(sh, y)",
}
"""The block as torch's dynamo exporter writes it, with something like a shared expert beside it."""


def block(form: dict[str, str], *, shape: str = "", **parts: str) -> ir.Model:
    """The block of `form` on tokens [B, S, H]; each part, and the shape of the output, may be spelled otherwise."""
    assert parts.keys() <= form.keys()
    shape = (shape or ("[B, S, H]" if form is GPT_OSS else "[T, H]")).replace("H", str(H))
    nodes = " ".join({**form, **parts}.values())
    return parse(f"(float[B, S, {H}] x) => (float{shape} z) {{ {nodes} }}", CONSTANTS)


def swapped(form: dict[str, str], part: str, *pairs: tuple[str, str]) -> dict[str, str]:
    """The part with some of its text replaced."""
    text = form[part]
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return {part: text}

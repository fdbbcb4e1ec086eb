"""Small MoE blocks written as a loop over experts that an exporter has unrolled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from tests.graphs import parse


@dataclass
class Loop:
    """One block: router of `width` experts, branches for `experts`; see `text` for what the other fields write."""

    width: int = 4
    experts: Sequence[int] | None = None
    hidden: int = 8
    inter: int = 6
    top_k: int = 2
    prefix: str = ""
    source: str = "x"
    result: str = "y"
    slot_first: bool = True
    scatter_add: bool = False
    weights: str = "right"
    bias: bool = False
    wide_expert: int | None = None
    fixed_expand: int | None = None
    fixed_reshape: int | None = None
    computed_id: int | None = None
    unadded: int | None = None
    extra: str = ""
    seed: int = 0
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        H = self.hidden
        self.experts = list(range(self.width)) if self.experts is None else list(self.experts)
        self.gate = [self._draw(rng, (self._inter(e), H)) for e in range(self.width)]
        self.up = [self._draw(rng, (self._inter(e), H)) for e in range(self.width)]
        self.down = [self._draw(rng, (H, self._inter(e))) for e in range(self.width)]
        self.router = self._draw(rng, (self.width, H), 2.0)
        self.down_bias = [self._draw(rng, (H,)) for _ in range(self.width)]
        constants: dict[str, object] = {
            "rows": [-1, H],
            "k": [self.top_k],
            "k_scalar": self.top_k,
            "last": [-1],
            "axis0": [0],
            "axis1": [1],
            "axis2": [2],
            "end2": [2],
            "depth": self.width,
            "off_on": [0, 1],
            "ones": [1, 1],
            "column": [-1, 1],
            "seven": [7, H],
            "arange": list(range(self.width)),
            **{f"id{e}": e for e in range(self.width)},
        }
        self.arrays = {name: np.array(value, np.int64) for name, value in constants.items()}
        p = self.prefix
        self.arrays[f"{p}router"] = self.router.T.copy()
        for name, tensors in (("gate", self.gate), ("up", self.up), ("down", self.down)):
            for e in range(self.width):
                tensor = tensors[e]
                stored_nk = self.weights in ("left", "gemm", "transpose")
                self.arrays[f"{p}{name}{e}"] = tensor if stored_nk else tensor.T.copy()
            if self.weights == "gather":
                self.arrays[f"{p}{name}s"] = np.stack([t.T for t in tensors])
        for e in range(self.width):
            self.arrays[f"{p}bias{e}"] = self.down_bias[e]

    def _inter(self, expert: int) -> int:
        return self.inter + (expert == self.wide_expert)

    @staticmethod
    def _draw(rng: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
        return (scale * rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def text(self) -> str:
        """The nodes, in ONNX text."""
        p = self.prefix
        perm = "2, 1, 0" if self.slot_first else "2, 0, 1"
        lines = [
            f"{p}flat = Reshape({self.source}, rows)",
            f"{p}logits = MatMul({p}flat, {p}router)",
            f"{p}probs = Softmax<axis=1>({p}logits)",
            f"{p}values, {p}ids = TopK({p}probs, k)",
            f"{p}total = ReduceSum<keepdims=1>({p}values, last)",
            f"{p}mixing = Div({p}values, {p}total)",
            f"{p}flat_shape = Shape({p}flat)",
            f"{p}acc = ConstantOfShape({p}flat_shape)",
        ]
        if self.scatter_add:
            lines += [
                f"{p}ids3 = Unsqueeze({p}ids, last)",
                f"{p}equal = Equal({p}ids3, arange)",
                f"{p}hot = Cast<to=7>({p}equal)",
            ]
        else:
            lines += [f"{p}hot = OneHot<axis=-1>({p}ids, depth, off_on)"]
        lines += [f"{p}mask = Transpose<perm=[{perm}]>({p}hot)", f"{p}mixing3 = Unsqueeze({p}mixing, axis2)"]
        acc = f"{p}acc"
        for e in self.experts or []:
            lines += self._branch(e, acc)
            acc = acc if e == self.unadded else f"{p}acc{e}"
        lines += [f"{p}shape = Shape({self.source})", f"{self.result} = Reshape({acc}, {p}shape)"]
        return "\n".join(lines)

    def _branch(self, e: int, acc: str) -> list[str]:
        p, q = self.prefix, f"{self.prefix}e{e}_"
        first, second = ("slot", "token") if self.slot_first else ("token", "slot")
        lines = []
        expert_id = f"id{e}"
        if e == self.computed_id:
            lines += [f"{q}id = ReduceMax<keepdims=0>({p}ids)"]
            expert_id = f"{q}id"
        lines += [
            f"{q}row = Gather<axis=0>({p}mask, {expert_id})",
            f"{q}bool = Cast<to=9>({q}row)",
            f"{q}found = NonZero({q}bool)",
            f"{q}pairs = Transpose<perm=[1, 0]>({q}found)",
        ]
        if self.scatter_add:
            lines += [f"{q}a = Slice({q}pairs, axis0, axis1, axis1)", f"{q}b = Slice({q}pairs, axis1, end2, axis1)"]
        else:
            lines += [f"{q}a, {q}b = Split<axis=1>({q}pairs, ones)"]
        lines += [f"{q}{first} = Squeeze({q}a, axis1)", f"{q}{second} = Squeeze({q}b, axis1)"]
        lines += [f"{q}at = Unsqueeze({q}token, last)"]
        if self.scatter_add:
            lines += [
                f"{q}slot1 = Unsqueeze({q}slot, last)",
                f"{q}x = GatherND({p}flat, {q}at)",
                f"{q}where = Concat<axis=-1>({q}at, {q}slot1)",
                f"{q}w = GatherND({p}mixing3, {q}where)",
            ]
        else:
            lines += [
                f"{q}x = Gather<axis=0>({p}flat, {q}token)",
                f"{p}{q}column = Flatten<axis=2>({p}mixing3)",
                f"{q}base = Mul({q}token, k_scalar)",
                f"{q}index = Add({q}slot, {q}base)",
                f"{q}w = Gather<axis=0>({p}{q}column, {q}index)",
            ]
        lines += self._mlp(e)
        lines += [f"{q}out0 = Mul({q}d, {q}w)"]
        out = f"{q}out0"
        if e == self.fixed_expand:
            lines += [f"{q}out1 = Expand({out}, seven)"]
            out = f"{q}out1"
        if e == self.fixed_reshape:
            lines += [f"{q}out1 = Reshape({out}, seven)"]
            out = f"{q}out1"
        if self.scatter_add:
            lines += [f'{p}acc{e} = ScatterND<reduction="add">({acc}, {q}at, {out})']
        else:
            lines += [
                f"{q}shape = Shape({out})",
                f"{q}to = Expand({q}at, {q}shape)",
                f"{q}acc_shape = Shape({acc})",
                f"{q}zeros = ConstantOfShape({q}acc_shape)",
                f"{q}scattered = ScatterElements<axis=0>({q}zeros, {q}to, {out})",
                f"{p}acc{e} = Add({acc}, {q}scattered)",
            ]
        return lines

    def _mlp(self, e: int) -> list[str]:
        p, q = self.prefix, f"{self.prefix}e{e}_"
        gate, up, down = f"{p}gate{e}", f"{p}up{e}", f"{p}down{e}"
        middle = [f"{q}s = Sigmoid({q}g)", f"{q}a1 = Mul({q}g, {q}s)", f"{q}h = Mul({q}a1, {q}u)"]
        if self.weights == "left":
            return [
                f"{q}xt = Transpose<perm=[1, 0]>({q}x)",
                f"{q}g = MatMul({gate}, {q}xt)",
                f"{q}u = MatMul({up}, {q}xt)",
                *middle,
                f"{q}dt = MatMul({down}, {q}h)",
                f"{q}d = Transpose<perm=[1, 0]>({q}dt)",
            ]
        if self.weights == "gemm":
            bias = f", {p}bias{e}" if self.bias else ""
            return [
                f"{q}g = Gemm<transB=1>({q}x, {gate})",
                f"{q}u = Gemm<transB=1>({q}x, {up})",
                *middle,
                f"{q}d = Gemm<transB=1>({q}h, {down}{bias})",
            ]
        lines = []
        if self.weights != "right":
            op = (
                "Transpose<perm=[1, 0]>({})" if self.weights == "transpose" else "Gather<axis=0>({}s, id" + str(e) + ")"
            )
            for name in ("gate", "up", "down"):
                stored = f"{p}{name}{e}" if self.weights == "transpose" else f"{p}{name}"
                lines.append(f"{q}{name} = {op.format(stored)}")
            gate, up, down = f"{q}gate", f"{q}up", f"{q}down"
        lines += [f"{q}g = MatMul({q}x, {gate})", f"{q}u = MatMul({q}x, {up})", *middle]
        lines += (
            [f"{q}d0 = MatMul({q}h, {down})", f"{q}d = Add({q}d0, {p}bias{e})"]
            if self.bias
            else [f"{q}d = MatMul({q}h, {down})"]
        )
        return lines


def model_of(*loops: Loop, before: str = "", after: str = "", outputs: str = "") -> ir.Model:
    """A model `x [B, S, H] -> y` of blocks one after the other, and what `before` and `after` add."""
    arrays = {name: array for loop in loops for name, array in loop.arrays.items()}
    parts = [part for part in (before, *(loop.text() for loop in loops), after) if part]
    shape = f"float[B, S, {loops[0].hidden}]"
    return parse(f"({shape} x) => ({outputs or shape + ' y'}) {{\n" + "\n".join(parts) + "\n}", arrays)


def rewritten(
    loop: Loop,
    *changes: tuple[str, str],
    inputs: str = "float[B, S, 8] x",
    outputs: str = "float[C, D, 8] y",
    **arrays: np.ndarray,
) -> ir.Model:
    """The model of one block with lines of its text replaced, and more constants."""
    text = loop.text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return parse(f"({inputs}) => ({outputs}) {{\n{text}\n}}", {**loop.arrays, **arrays})

"""Parts of `export`: headers of shards, which tensors make a parameter, activations of experts, kinds of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.testing import assert_array_equal

from graph_passes.accuracy import relative_l2
from graph_passes.external_data import ModelFileError
from graph_passes.mapped import MappedTensor
from hina_ort.export import dense_weights
from hina_ort.export.shards import Checkpoint, StoredTensor, read_header
from hina_ort.export.weight_map import Source, sources
from tests import graphs

BF16 = ir.DataType.BFLOAT16.numpy()


def write_shard(path: Path, tensors: dict[str, np.ndarray], **changes: Any) -> Path:
    """A safetensors file, with entries of its header changed."""
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": names[array.dtype.name], "shape": list(array.shape), "data_offsets": [begin, end]}
        header[name] |= changes.get(name, {})
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in tensors.values()))
    return path


def stored(folder: Path, array: np.ndarray, name: str = "weight") -> StoredTensor:
    return read_header(write_shard(folder / f"{name}.safetensors", {name: array}))[name]


def test_headers_agree_with_the_safetensors_library(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "a.b": rng.standard_normal((3, 5)).astype(BF16),
        "c": np.arange(7, dtype=np.uint8),
        "d": np.zeros((0, 2), np.float32),
    }
    found = read_header(write_shard(tmp_path / "x.safetensors", arrays))
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert_array_equal(found[name].tensor().numpy(), array)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [2, 2]}, "has 24 bytes, its shape asks for 16"),
        ({"dtype": "F4"}, "unknown type F4"),
        ({"data_offsets": [-4, 20]}, "tensor a has 24 bytes"),
        ({"data_offsets": [1000, 1024]}, "is cut off"),
        ({"data_offsets": None}, "cannot be read"),
        ({"shape": "six"}, "cannot be read"),
    ],
    ids=str,
)
def test_headers_that_lie(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = write_shard(tmp_path / "x.safetensors", {"a": np.zeros((2, 3), np.float32)}, a=change)
    with pytest.raises(ModelFileError, match=r"x\.safetensors") as caught:
        read_header(path)
    assert words in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"1234", b"\xff" * 8, (9).to_bytes(8, "little") + b"not json!"], ids=str)
def test_no_safetensors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        Checkpoint.read(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": {"a": "../other.safetensors"}}', "no json"], ids=str)
def test_indices_that_lie(tmp_path: Path, index: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelFileError, match=r"index\.json"):
        Checkpoint.read(tmp_path)


@pytest.mark.dynamo
class TestParameters:
    """Which tensors of a checkpoint make each parameter, by the rules of transformers."""

    EXPERTS = 12  # "10" sorts before "2" as text

    @pytest.fixture
    def module(self) -> Any:
        from transformers import MixtralConfig

        from hina_ort.export import tracing

        sizes = {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = MixtralConfig(**sizes, num_hidden_layers=1, vocab_size=32, num_local_experts=self.EXPERTS)
        return tracing.build(config)

    def checkpoint(self, folder: Path, module: Any, *left_out: str) -> Checkpoint:
        """Tensors as Mixtral's publisher names them, each filled with a number of its own."""
        shapes = {name: tuple(value.shape) for name, value in module.state_dict().items() if "experts" not in name}
        experts = {"w1": (8, 16), "w3": (8, 16), "w2": (16, 8)}
        for expert in range(self.EXPERTS):
            shapes |= {f"model.layers.0.block_sparse_moe.experts.{expert}.{n}.weight": s for n, s in experts.items()}
        shapes = {name.replace("mlp.gate", "block_sparse_moe.gate"): shape for name, shape in shapes.items()}
        arrays = {n: np.full(s, i, np.float32) for i, (n, s) in enumerate(shapes.items()) if n not in left_out}
        arrays["model.layers.7.unread.weight"] = np.zeros((1, 1), np.float32)
        write_shard(folder / "model.safetensors", arrays)
        (folder / "config.json").write_text("{}")
        return Checkpoint.read(folder)

    def test_experts_one_by_one(self, tmp_path: Path, module: Any) -> None:
        found = sources(module, self.checkpoint(tmp_path, module))
        assert found.keys() == module.state_dict().keys()
        both, down = (found[f"model.layers.0.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
        wanted = [[f"model.layers.0.block_sparse_moe.experts.{e}.{n}.weight" for e in range(12)] for n in ("w1", "w3")]
        assert [[tensor.name for tensor in each] for each in both.experts() or ()] == wanted
        assert len(down.experts() or ()) == 1 and down.stored is None

    def test_merged_as_transformers_merges(self, tmp_path: Path, module: Any) -> None:
        """What is computed where experts cannot be read one by one."""
        both = sources(module, self.checkpoint(tmp_path, module))["model.layers.0.mlp.experts.gate_up_proj"]
        gates, ups = both.experts() or ()
        stacked = [np.concatenate([g.tensor().numpy(), u.tensor().numpy()]) for g, u in zip(gates, ups, strict=True)]
        assert_array_equal(both.numpy(), np.stack(stacked))

    def test_a_missing_tensor(self, tmp_path: Path, module: Any) -> None:
        name = "model.layers.0.self_attn.q_proj.weight"
        with pytest.raises(ModelFileError, match=name):
            sources(module, self.checkpoint(tmp_path, module, name))

    def test_a_tied_head(self, tmp_path: Path, module: Any) -> None:
        module.lm_head.weight = module.model.embed_tokens.weight
        found = sources(module, self.checkpoint(tmp_path, module, "lm_head.weight"))
        assert found["lm_head.weight"] is found["model.embed_tokens.weight"]

    def test_another_shape(self, tmp_path: Path, module: Any) -> None:
        source = sources(module, self.checkpoint(tmp_path, module))["model.norm.weight"]
        with pytest.raises(ModelFileError, match=r"has the shape \[16\], config\.json asks for \[17\]"):
            Source(source.name, (17,), source.tensors).numpy()


@pytest.mark.dynamo
@pytest.mark.parametrize(
    ("activation", "expected"),
    [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("relu", "relu"), ("relu2", "relu2")],
)
def test_activations(activation: str, expected: str) -> None:
    assert activation_of(activation) == {"activation": expected}


@pytest.mark.dynamo
def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ModelFileError, match="MixtralExperts"):
        activation_of("tanh")


def activation_of(name: str) -> dict[str, Any]:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    from hina_ort.export import experts

    config = MixtralConfig(hidden_size=8, intermediate_size=8, num_local_experts=2, hidden_act=name)
    return experts._activation(MixtralExperts(config))


# Of normal weights, 32 to a scale, the largest is about 2.5 deviations: a step is 2.5 / 127 or 2.5 / 7.5 of one, and
# rounding errs by a step / sqrt(12), which is 0.006 for int8 and 0.1 for int4. bfloat16 values of this size are exact
# in float16.
@pytest.mark.parametrize(("kind", "bound"), [("f32", 1e-6), ("f16", 1e-3), ("int8", 1e-2), ("int4", 0.15)])
def test_kinds_of_matrices(tmp_path: Path, kind: str, bound: float) -> None:
    """A linear layer `[N, K]` in bfloat16 whose head is tied to the embeddings."""
    matrix = np.random.default_rng(0).standard_normal((48, 64)).astype(BF16)
    source = Source("table", matrix.shape, {"": [stored(tmp_path, matrix)]})
    text = """(int64[T] ids) => (float[T, 48] y) {
        rows = Gather (table, ids)
        turned = Transpose <perm: ints = [1, 0]> (table)
        y = MatMul (rows, turned)
    }"""
    model = graphs.parse(text, {"table": matrix.astype(np.float32)})
    model.graph.initializers["table"].const_value = None
    dense_weights.fill(model, {"table": source})
    dense_weights.place_dense(model, {"table": source}, lambda tensor: tensor.tensor(), kind)
    lookups = [node.inputs[0] for node in model.graph if node.op_type == "Gather"]
    assert [type(value.const_value) for value in lookups if value is not None] == [MappedTensor]
    for value in model.graph.initializers.values():  # onnx_ir writes no lazy bfloat16 into a message
        assert value.const_value is not None
        value.const_value = ir.Tensor(value.const_value.numpy().copy(), dtype=value.const_value.dtype, name=value.name)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    ids = np.array([5, 0, 47, 5])
    expected = matrix.astype(np.float64)[ids] @ matrix.astype(np.float64).T
    assert relative_l2(expected, session.run(None, {"ids": ids})[0].astype(np.float64)) < bound

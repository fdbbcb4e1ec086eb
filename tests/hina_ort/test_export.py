"""`export` on one checkpoint: what it reads and writes, and what it says and leaves when something is wrong."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from numpy.testing import assert_array_equal

from graph_passes.external_data import ModelFileError
from graph_passes.mapped import MappedTensor
from hina_ort.files import find_model
from models.language_models import VOCABULARY
from tests import decoders

pytestmark = pytest.mark.dynamo

ROOT = Path(__file__).parents[2]
SHARD = "model-00001-of-00002.safetensors"
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from models import checkpoints

    return checkpoints.build("qwen3_moe", tmp_path_factory.mktemp("checkpoint") / "qwen3_moe")


@pytest.fixture(scope="module")
def trace(checkpoint: Path) -> Iterator[None]:
    """Trace once: the graph depends on the configuration alone."""
    from hina_ort.export import tracing

    made: list[tracing.Traced] = []
    original = tracing.trace

    def once(*arguments: Any) -> tracing.Traced:
        if not made:
            made.append(original(*arguments))
        return tracing.Traced(made[0].model.clone(), made[0].states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "trace", once)
        yield


def copied(checkpoint: Path, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for path in checkpoint.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def logits(folder: Path) -> decoders.Array:
    ids, mask = decoders.padded([5, 3], VOCABULARY)
    return decoders.read(decoders.OnnxDecoder(folder), ids, mask, [3, 2])


@contextmanager
def unchanged(*folders: Path) -> Iterator[None]:
    """Nothing in `folders` is changed or added by the body, whatever happens in it."""
    before = [content(folder) for folder in folders]
    try:
        yield
    finally:
        assert [content(folder) for folder in folders] == before


def test_no_expert_is_read(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: None) -> None:
    from hina_ort.export.command import export

    read: set[str] = set()
    for method in ("numpy", "tobytes", "tofile"):
        original = getattr(MappedTensor, method)

        def recorded(self: MappedTensor, *arguments: Any, original: Any = original) -> Any:
            read.add(str(self.name))
            return original(self, *arguments)

        monkeypatch.setattr(MappedTensor, method, recorded)
    export(checkpoint, tmp_path / "out")
    assert "model.layers.0.self_attn.q_proj.weight" in read
    assert not [name for name in read if ".experts." in name or "embed_tokens" in name]


def test_expert_bytes_do_not_matter(checkpoint: Path, tmp_path: Path, trace: None) -> None:
    """Shards of zeros give the same graph, of which only the dense parts differ."""
    from hina_ort.export.command import export
    from models.checkpoints import without_data

    export(checkpoint, tmp_path / "out")
    export(without_data(checkpoint, tmp_path / "zeros"), tmp_path / "other")
    models = [ir.load(tmp_path / name / "model.onnx") for name in ("out", "other")]
    described = [
        {
            str(value.name): (t.location, t.offset, t.length, t.dtype)
            for value in model.graph.initializers.values()
            if isinstance(t := value.const_value, ir.ExternalTensor)
        }
        for model in models
    ]
    assert described[0] == described[1]


@pytest.mark.parametrize("stage", ["tracing", "writing"])
def test_an_interrupt_leaves_nothing(checkpoint: Path, tmp_path: Path, trace: None, stage: str) -> None:
    from hina_ort.export.command import export

    def stop(current: str, done: int, total: int) -> None:
        if current == stage:
            raise KeyboardInterrupt

    with unchanged(checkpoint, tmp_path), pytest.raises(KeyboardInterrupt):
        export(checkpoint, tmp_path / "out", progress=stop)


def test_a_full_disk_leaves_nothing(checkpoint: Path, tmp_path: Path, trace: None) -> None:
    from hina_ort.export.command import export

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with (
            unchanged(checkpoint, tmp_path),
            pytest.raises(ModelFileError, match=r"out/model\.onnx cannot be written: File too"),
        ):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
            export(checkpoint, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_the_cache_of_huggingface_hub(checkpoint: Path, tmp_path: Path, trace: None) -> None:
    from hina_ort.export.command import export
    from models.checkpoints import cached

    export(checkpoint, tmp_path / "plain")
    snapshot = cached(checkpoint, tmp_path / "hub")
    assert (snapshot / SHARD).is_symlink()
    export(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / SHARD).samefile(snapshot / SHARD)
    assert_array_equal(logits(tmp_path / "out"), logits(tmp_path / "plain"))


@pytest.mark.parametrize("options", [{"shards": 1}, {"dtype": "float32"}], ids=str)
def test_other_checkpoints(tmp_path: Path, trace: None, options: dict[str, Any]) -> None:
    from hina_ort.export.command import export
    from models import checkpoints

    source = checkpoints.build("qwen3_moe", tmp_path / "source", **options)
    export(source, tmp_path / "out")
    ids, mask = decoders.padded([5, 3], VOCABULARY)
    expected = decoders.read(decoders.TorchDecoder(checkpoints.reference(source)), ids, mask, [5])
    assert decoders.distance(logits(tmp_path / "out"), expected, mask) <= 1e-4


def test_a_copy_needs_no_checkpoint(checkpoint: Path, tmp_path: Path, trace: None) -> None:
    from hina_ort.export.command import export

    export(checkpoint, tmp_path / "linked")
    source = copied(checkpoint, tmp_path / "source")
    export(source, tmp_path / "out", copy=True)
    for path in source.iterdir():
        path.write_bytes(b"")
    assert_array_equal(logits(tmp_path / "out"), logits(tmp_path / "linked"))


def remove(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def cut(name: str, size: int) -> Any:
    return lambda folder: os.truncate(folder / name, size)


def changed(**values: Any) -> Any:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return change


def with_experts(change: Any) -> Any:
    """Change the tensors of the first shard, a dict by name."""

    def spoil(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / SHARD)
        change(tensors)
        save_file(tensors, folder / SHARD, metadata={"format": "pt"})

    return spoil


def without_an_expert(tensors: dict[str, Any]) -> None:
    del tensors[EXPERT]


def with_a_small_expert(tensors: dict[str, Any]) -> None:
    tensors[EXPERT] = tensors[EXPERT][:16].clone()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (remove("config.json"), "config.json does not exist"),
        (remove(SHARD), f"{SHARD} is missing"),
        (cut(SHARD, 100_000), f"{SHARD} holds 100000 bytes"),
        (cut(SHARD, 50), f"{SHARD} is no safetensors file"),
        (changed(model_type="no_such_type"), "no_such_type, which transformers does not know; these can be exported: "),
        (changed(model_type="bert"), "without experts"),
        (changed(quantization_config={"quant_method": "fp8"}), "quantised by fp8"),
        (with_experts(without_an_expert), "holds 7 tensors like model.layers.0.mlp.experts.0.up_proj.weight"),
        (with_experts(with_a_small_expert), f"{EXPERT} has the shape [16, 64], config.json asks for [32, 64]"),
    ],
    ids=["no config", "no shard", "cut shard", "cut header", "unknown", "no experts", "fp8", "7 experts", "small"],
)
def test_broken_checkpoints(checkpoint: Path, tmp_path: Path, trace: None, spoil: Any, words: str) -> None:
    from hina_ort.export.command import export

    source = copied(checkpoint, tmp_path / "source")
    spoil(source)
    with unchanged(source), pytest.raises(ModelFileError) as caught:
        export(source, tmp_path / "out")
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    from hina_ort.export.command import export

    for source in (Path("Qwen/Qwen3-30B-A3B"), tmp_path / "config.json"):
        with pytest.raises(ModelFileError, match=f"{source} is no folder; download the checkpoint"):
            export(source, tmp_path / "out")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="holds neither model"):
        export(tmp_path, tmp_path / "out")


def test_a_checkpoint_is_no_model(checkpoint: Path) -> None:
    with pytest.raises(ModelFileError, match=r"holds no model\.onnx; export this checkpoint first: hina-ort export"):
        find_model(checkpoint)


def test_overwriting(checkpoint: Path, tmp_path: Path, trace: None) -> None:
    from hina_ort.export.command import export

    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="--overwrite"):
        export(checkpoint, out)
    with unchanged(checkpoint):
        export(checkpoint, out, overwrite=True)
        first = logits(out)
        export(checkpoint, out, overwrite=True)
    assert_array_equal(logits(out), first)


@pytest.mark.parametrize(
    ("options", "close"), [({"dense": "f16"}, 2e-3), ({"weights": "f32"}, 1e-4), ({"weights": "int8"}, 5e-2)], ids=str
)
def test_types_of_weights(checkpoint: Path, tmp_path: Path, trace: None, options: dict[str, str], close: float) -> None:
    from hina_ort.export.command import export
    from models.checkpoints import reference

    with unchanged(checkpoint):
        export(checkpoint, tmp_path / "out", **options)  # type: ignore[arg-type]
    ids, mask = decoders.padded([5, 3], VOCABULARY)
    expected = decoders.read(decoders.TorchDecoder(reference(checkpoint)), ids, mask, [5])
    assert decoders.distance(logits(tmp_path / "out"), expected, mask) <= close


INTERRUPTED = """
import signal, sys, time
from graph_passes import external_data
from hina_ort.cli import app

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts in the background ignore Ctrl-C
save = external_data.save

def stop(*_):
    print("ready", flush=True)
    time.sleep(60)

external_data.save = lambda model, path, progress=None: save(model, path, stop)
app()
"""


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, "export", str(checkpoint), str(tmp_path / "out"), "--quiet"]
    with (
        unchanged(checkpoint, tmp_path),
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert "Traceback" not in process.stderr.read()

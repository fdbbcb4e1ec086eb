"""Models and their weights on disk: nothing half-written, nothing copied twice, clear words for broken files."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from graph_passes import external_data
from graph_passes.external_data import ModelFileError, load, save
from graph_passes.mapped import MappedTensor

BIG = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
SMALL = np.array([1.0, 2.0], np.float32)


def proto() -> onnx.ModelProto:
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "big"], ["a"]),
            helper.make_node("Mul", ["a", "factor"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 32])],
        [numpy_helper.from_array(BIG, "big"), numpy_helper.from_array(SMALL[:1], "factor")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def source(folder: Path, name: str = "source.onnx", data: str = "source.data") -> Path:
    """A model whose weight `big` lies in an external file, at offset 0."""
    folder.mkdir(parents=True, exist_ok=True)
    model = proto()
    onnx.save_model(model, folder / name, save_as_external_data=True, location=data, size_threshold=1024)
    return folder / name


def run(path: Path) -> np.ndarray:
    return ort.InferenceSession(path).run(None, {"x": np.ones((3, 64), np.float32)})[0]


def external(path: Path) -> dict[str, dict[str, str]]:
    """Per external tensor of the file: its external_data entries."""
    model = onnx.load(path, load_external_data=False)
    return {
        t.name: {e.key: e.value for e in t.external_data}
        for t in model.graph.initializer
        if t.data_location == TensorProto.EXTERNAL
    }


def test_weights_go_to_a_data_file_at_page_boundaries(tmp_path: Path) -> None:
    model = ir.from_proto(proto())
    for index in range(3):
        tensor = ir.Tensor(BIG[: 8 + index] + index, name=f"w{index}")
        model.graph.register_initializer(ir.Value(name=f"w{index}", const_value=tensor))
    target = tmp_path / "new" / "model.onnx"
    calls: list[tuple[int, int]] = []
    save(model, target, lambda done, total: calls.append((done, total)))
    total = (64 + 8 + 9 + 10) * BIG[0].nbytes
    assert sorted(os.listdir(target.parent)) == ["model.onnx", "model.onnx.data"]
    places = external(target)
    assert set(places) == {"big", "w0", "w1", "w2"}
    assert all(int(place["offset"]) % 4096 == 0 and place["location"] == "model.onnx.data" for place in places.values())
    assert calls[-1] == (total, total) and calls == sorted(calls) and len(calls) == 4
    again = load(target)
    assert isinstance(again.graph.initializers["big"].const_value, ir.ExternalTensor)
    for index in range(3):
        np.testing.assert_array_equal(
            again.graph.initializers[f"w{index}"].const_value.numpy(), BIG[: 8 + index] + index
        )
    np.testing.assert_array_equal(run(target), np.ones((3, 64), np.float32) @ BIG)


def test_the_model_is_unchanged_by_saving(tmp_path: Path) -> None:
    model = ir.from_proto(proto())
    tensor = model.graph.initializers["big"].const_value
    save(model, tmp_path / "model.onnx")
    assert model.graph.initializers["big"].const_value is tensor


def test_lazy_tensors_are_computed_one_at_a_time(tmp_path: Path) -> None:
    alive, most = 0, 0

    class Counted(ir.Tensor):
        def __init__(self, array: np.ndarray) -> None:
            nonlocal alive, most
            super().__init__(array)
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    model = ir.from_proto(proto())
    for index in range(5):
        lazy = ir.LazyTensor(
            lambda index=index: Counted(BIG + index), ir.DataType.FLOAT, ir.Shape(BIG.shape), name=f"lazy{index}"
        )
        model.graph.register_initializer(ir.Value(name=f"lazy{index}", const_value=lazy))
    save(model, tmp_path / "model.onnx")
    assert (alive, most) == (0, 1)
    again = load(tmp_path / "model.onnx")
    np.testing.assert_array_equal(again.graph.initializers["lazy4"].const_value.numpy(), BIG + 4)


def test_bfloat16_weights(tmp_path: Path) -> None:
    import ml_dtypes

    model = ir.from_proto(proto())
    array = BIG.astype(ml_dtypes.bfloat16)
    model.graph.register_initializer(ir.Value(name="half", const_value=ir.Tensor(array, name="half")))
    save(model, tmp_path / "model.onnx")
    tensor = load(tmp_path / "model.onnx").graph.initializers["half"].const_value
    assert tensor.dtype == ir.DataType.BFLOAT16
    np.testing.assert_array_equal(tensor.numpy(), array)


def test_weights_in_the_same_folder_stay_where_they_are(tmp_path: Path) -> None:
    path = source(tmp_path)
    model = load(path)
    model.graph.register_initializer(ir.Value(name="extra", const_value=ir.Tensor(BIG + 1, name="extra")))
    target = tmp_path / "target.onnx"
    save(model, target)
    places = external(target)
    assert places["big"]["location"] == "source.data"
    assert places["extra"]["location"] == "target.onnx.data"
    assert (tmp_path / "target.onnx.data").stat().st_size == BIG.nbytes
    np.testing.assert_array_equal(run(target), run(path))


def test_nothing_new_means_no_data_file(tmp_path: Path) -> None:
    save(load(source(tmp_path)), tmp_path / "target.onnx")
    assert sorted(os.listdir(tmp_path)) == ["source.data", "source.onnx", "target.onnx"]


def test_weights_go_along_to_another_folder(tmp_path: Path) -> None:
    path = source(tmp_path / "a")
    target = tmp_path / "b" / "target.onnx"
    save(load(path), target)
    assert external(target)["big"]["location"] == "target.onnx.data"
    np.testing.assert_array_equal(run(target), run(path))


def test_two_models_in_one_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save(load(source(tmp_path / name)), tmp_path / "both" / f"{name}.onnx")
    assert len(os.listdir(tmp_path / "both")) == 4
    for name in ("one", "two"):
        assert run(tmp_path / "both" / f"{name}.onnx").shape == (3, 32)


def test_data_in_a_subfolder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    path = source(tmp_path, data="sub/weights.bin")
    model = load(path)
    np.testing.assert_array_equal(model.graph.initializers["big"].const_value.numpy(), BIG)
    save(model, tmp_path / "target.onnx")
    assert external(tmp_path / "target.onnx")["big"]["location"] == os.path.join("sub", "weights.bin")


def hugging_face(root: Path, *, model: bool = True, data: bool = True) -> Path:
    """A model in a cache of Hugging Face: what is not linked into the snapshot is copied there."""
    blobs, snapshot = root / "blobs", root / "snapshots" / "abc"
    source(blobs, "m")
    snapshot.mkdir(parents=True)
    (blobs / "source.data").rename(blobs / "d")
    for linked, name, blob in ((model, "model.onnx", "m"), (data, "source.data", "d")):
        if linked:
            (snapshot / name).symlink_to(f"../../blobs/{blob}")
        else:
            shutil.copy(blobs / blob, snapshot / name)
    return snapshot / "model.onnx"


def test_hugging_face_cache_of_links(tmp_path: Path) -> None:
    path = hugging_face(tmp_path)
    model = load(path)
    np.testing.assert_array_equal(model.graph.initializers["big"].const_value.numpy(), BIG)
    for target in (path.with_name("beside.onnx"), tmp_path / "blobs" / "beside.onnx", tmp_path / "out" / "model.onnx"):
        save(model, target)
        np.testing.assert_array_equal(run(target), run(path))
    assert path.read_bytes() == (tmp_path / "blobs" / "m").read_bytes()


def test_a_linked_file_beside_the_model_stays_where_it_is(tmp_path: Path) -> None:
    path = source(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "source.data").rename(tmp_path / "sub" / "d")
    (tmp_path / "source.data").symlink_to("sub/d")
    save(load(path), tmp_path / "target.onnx")
    assert external(tmp_path / "target.onnx")["big"]["location"] == "source.data"
    np.testing.assert_array_equal(run(tmp_path / "target.onnx"), run(path))


def linked_blob(root: Path, target: str) -> Path:
    path = hugging_face(root)
    (root / "blobs" / target).parent.mkdir(exist_ok=True)
    (root / "blobs" / "d").rename(root / "blobs" / target)
    (root / "blobs" / "d").symlink_to(target)
    return path


def linked_model(root: Path) -> Path:
    source(root / "real")
    (root / "links").mkdir()
    (root / "links" / "model.onnx").symlink_to("../real/source.onnx")
    return root / "links" / "model.onnx"


def linked_folder(root: Path) -> Path:
    source(root / "real")
    (root / "link").symlink_to("real")
    return root / "link" / "source.onnx"


def linked_subfolder(root: Path) -> Path:
    path = relocated(root / "model", "sub/source.data")
    (root / "outside").mkdir()
    (root / "model" / "source.data").rename(root / "outside" / "source.data")
    (root / "model" / "sub").symlink_to("../outside")
    return path


def hard_linked(root: Path) -> Path:
    path = source(root)
    os.link(root / "source.data", root / "other.data")
    return path


def there_and_back(root: Path) -> Path:
    (root / "sub").mkdir()
    return relocated(root, "sub/../source.data")


@pytest.mark.parametrize(
    ("layout", "allowed"),
    [
        (hugging_face, True),
        (partial(hugging_face, model=False), False),
        (partial(hugging_face, data=False), True),
        (partial(linked_blob, target="sub/d"), True),
        (partial(linked_blob, target="../elsewhere/d"), False),
        (linked_model, False),
        (linked_folder, True),
        (linked_subfolder, False),
        (hard_linked, True),
        (there_and_back, True),
        (lambda root: relocated(root, "./source.data"), True),
        (lambda root: relocated(root, str(root / "source.data")), False),
        (lambda root: relocated(root / "inner", "../outside.data"), False),
        (lambda root: relocated(root, ""), False),
        (lambda root: relocated(root, "."), False),
    ],
)
def test_data_may_lie_where_onnx_runtime_allows_it(
    tmp_path: Path, layout: Callable[[Path], Path], *, allowed: bool
) -> None:
    (tmp_path / "outside.data").write_bytes(BIG.tobytes())
    path = layout(tmp_path)
    if allowed:
        np.testing.assert_array_equal(load(path).graph.initializers["big"].const_value.numpy(), BIG)
        assert run(path).shape == (3, 32)
    else:
        with pytest.raises(ModelFileError, match=r"(beside the model|correct its location)$"):
            load(path)
        with pytest.raises(Exception, match=r"(?i)external data|path|regular file"):
            run(path)


def relocated(tmp_path: Path, location: str) -> Path:
    path = source(tmp_path)
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = location
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("location", ["../source.data", "sub/../../source.data", "/etc/passwd"])
def test_data_outside_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    path = relocated(tmp_path / "inner", location)
    (tmp_path / "source.data").write_bytes(BIG.tobytes())
    with pytest.raises(ModelFileError, match=r"tensor big lies in .* outside the model's folder"):
        load(path)


def test_missing_data_file(tmp_path: Path) -> None:
    path = source(tmp_path)
    (tmp_path / "source.data").unlink()
    with pytest.raises(ModelFileError, match=r"its external data file source.data cannot be read \(No such file"):
        load(path)


def test_cut_off_data_file(tmp_path: Path) -> None:
    path = source(tmp_path)
    os.truncate(tmp_path / "source.data", BIG.nbytes - 1)
    with pytest.raises(ModelFileError, match=r"tensor big needs bytes 0 to 8192 of source.data, which holds 8191"):
        load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no ONNX model"),
        (b"not a model at all, but some text that goes on", "is no ONNX model"),
        (proto().SerializeToString()[:-9000], "is no ONNX model, or it is cut off"),
        (proto().SerializeToString()[:-5], "is no ONNX model, or it is cut off"),
    ],
)
def test_broken_model_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(ModelFileError, match=message):
        load(tmp_path / "model.onnx")


def test_missing_model_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="does not exist"):
        load(tmp_path / "model.onnx")
    with pytest.raises(ModelFileError, match="is a folder"):
        load(tmp_path)


def test_constants_with_external_data_are_read(tmp_path: Path) -> None:
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(BIG, "c"))
    graph = helper.make_graph(
        [constant, helper.make_node("Add", ["x", "c"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [64, 32])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save_model(
        model,
        tmp_path / "m.onnx",
        save_as_external_data=True,
        location="c.data",
        convert_attribute=True,
        size_threshold=0,
    )
    loaded = load(tmp_path / "m.onnx")
    np.testing.assert_array_equal(loaded.graph[0].attributes["value"].as_tensor().numpy(), BIG)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_save_leaves_the_old_files(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "model.onnx"
    save(ir.from_proto(proto()), target)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}

    def fail() -> ir.Tensor:
        raise error

    model = ir.from_proto(proto())
    lazy = ir.LazyTensor(fail, ir.DataType.FLOAT, ir.Shape(BIG.shape), name="bad")
    model.graph.register_initializer(ir.Value(name="bad", const_value=lazy))
    with pytest.raises(error):
        save(model, target)
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The system refuses to make files larger than that, as it does when a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", ["copied", "computed"])
def test_a_disk_that_fills_up_is_said_and_nothing_is_left(tmp_path: Path, kind: str) -> None:
    path = source(tmp_path / "source")
    model = load(path) if kind == "copied" else ir.from_proto(proto())
    before = {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}
    with largest_file(BIG.nbytes // 2), pytest.raises(ModelFileError, match=r"out/m.onnx cannot be written: File too"):
        save(model, tmp_path / "out" / "m.onnx")
    assert {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")} == before
    assert np.array_equal(model.graph.initializers["big"].const_value.numpy(), BIG)


def test_a_disk_without_room_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")(1 << 40, 1 << 39, BIG.nbytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(external_data, "write_tensor", lambda *_: pytest.fail("written"))
    with pytest.raises(ModelFileError, match=r"cannot be written: it needs 8,192 bytes .* has 8,191 free; make room"):
        save(ir.from_proto(proto()), tmp_path / "model.onnx")
    assert os.listdir(tmp_path) == []


def test_two_names_of_the_same_bytes_are_written_once(tmp_path: Path) -> None:
    model = load(source(tmp_path / "a"))
    tied = MappedTensor.of(model.graph.initializers["big"].const_value)
    model.graph.register_initializer(ir.Value(name="tied", const_value=tied))
    target = tmp_path / "b" / "model.onnx"
    save(model, target)
    assert (tmp_path / "b" / "model.onnx.data").stat().st_size == BIG.nbytes
    assert external(target)["tied"]["offset"] == external(target)["big"]["offset"]
    np.testing.assert_array_equal(load(target).graph.initializers["tied"].const_value.numpy(), BIG)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFileError, match="cannot be written"):
        save(ir.from_proto(proto()), tmp_path / "file" / "model.onnx")


def test_data_of_the_source_is_never_overwritten(tmp_path: Path) -> None:
    path = source(tmp_path, "source.onnx", "target.onnx.data")
    with pytest.raises(ModelFileError, match=r"target.onnx.data .* holds weights of the model being saved"):
        save(load(path), tmp_path / "target.onnx")
    assert run(path).shape == (3, 32)


def test_release_while_an_array_looks_in(tmp_path: Path) -> None:
    tensor = load(source(tmp_path)).graph.initializers["big"].const_value
    array = tensor.numpy()
    external_data.release(tensor)
    np.testing.assert_array_equal(array, BIG)
    np.testing.assert_array_equal(tensor.numpy(), BIG)


def test_tensors_below_the_limit_move_into_the_model(tmp_path: Path) -> None:
    onnx.save_model(proto(), tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    model = load(tmp_path / "m.onnx")
    assert isinstance(model.graph.initializers["factor"].const_value, ir.ExternalTensor)
    save(model, tmp_path / "out" / "m.onnx")
    assert set(external(tmp_path / "out" / "m.onnx")) == {"big"}
    np.testing.assert_array_equal(run(tmp_path / "out" / "m.onnx"), np.ones((3, 64), np.float32) @ BIG)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_save_leaves_no_new_folder(tmp_path: Path, error: type[BaseException]) -> None:
    def fail(*_: int) -> None:
        raise error

    (tmp_path / "there").mkdir()
    with pytest.raises(error):
        save(ir.from_proto(proto()), tmp_path / "there" / "new" / "deep" / "model.onnx", fail)
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_cannot_part_a_model_from_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    kept = signal.signal(number, stop)
    target = tmp_path / "model.onnx"
    save(ir.from_proto(proto()), target)
    model = ir.from_proto(proto())
    shift = ir.Value(name="shift", const_value=ir.Tensor(BIG + 1, name="shift"))
    model.graph.register_initializer(shift)
    move = os.replace

    def interrupted(old: Path, new: Path) -> None:
        move(old, new)
        if Path(new).parent == tmp_path:
            signal.raise_signal(number)

    monkeypatch.setattr(os, "replace", interrupted)
    try:
        with suppress(KeyboardInterrupt):
            save(model, target)
    finally:
        signal.signal(number, kept)
    assert set(external(target)) == {"big", "shift"}
    np.testing.assert_array_equal(load(target).graph.initializers["shift"].const_value.numpy(), BIG + 1)
    assert sorted(os.listdir(tmp_path)) == ["model.onnx", "model.onnx.data"]

"""The files of a command that writes a model, SRC to DST: which ones, what they hold, and that none is left half."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from graph_passes import external_data
from graph_passes.external_data import ModelFileError
from graph_passes.mapped import InlineTensor
from graph_passes.staging import publish, restored_on_error, staging_folder

MODEL_NAME = "model.onnx"

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total): bytes in a stage of BYTE_STAGES."""

BYTE_STAGES = ("writing",)


class UsageError(ValueError):
    """The arguments contradict each other; the message says how."""


@dataclass(frozen=True)
class DataFile:
    """A data file of SRC, and the bytes of its tensors that DST reads."""

    file: str
    bytes: int


@dataclass(frozen=True)
class Paths:
    """Where to read and write: `destination` is the model file to write, `folder` the output folder to make, if any."""

    source: Path
    destination: Path
    folder: Path | None


def find_model(path: Path, name: str = MODEL_NAME) -> Path:
    """The model file that `path` names: itself, or `name` in a folder. ModelFileError when there is none."""
    if path.is_dir():
        model = path / name
        if not model.exists():
            checkpoint = any(path.glob("*.safetensors"))
            advice = "export this checkpoint first: hina-ort export" if checkpoint else "name the model file itself"
            raise ModelFileError(f"the folder {path} holds no {name}; {advice}")
        return model
    if not path.exists():
        raise ModelFileError(f"{path} does not exist")
    return path


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Turn what goes wrong with the graph of the model `path` into a ModelFileError, with the objection of ONNX."""
    try:
        yield
    except (UsageError, ModelFileError, OSError, MemoryError):
        raise
    except Exception as error:  # an invalid graph can fail anywhere
        try:
            onnx.checker.check_model(os.fspath(path))
            reason = f"{type(error).__name__}: {error}"
        except Exception as problem:  # protobuf's and ONNX's own errors
            reason = str(problem)
        first = next(iter(reason.strip().splitlines()), type(error).__name__)
        raise ModelFileError(
            f"{path} cannot be read as a graph: {first}; check that ONNX Runtime loads it, and report it if it does"
        ) from error


def resolve(src: Path, dst: Path, overwrite: bool, model_name: str = MODEL_NAME) -> Paths:
    """Where to read and write; UsageError, ModelFileError or an OSError that says what is wrong with SRC or DST.

    A folder's model is called `model_name`.
    """
    source = find_model(src, model_name)
    folder = dst if src.is_dir() else None
    destination = dst / model_name if folder else dst
    for one, other in ((src, dst), (source, destination)):
        if one.resolve() == other.resolve() or (other.exists() and one.samefile(other)):
            raise UsageError(f"SRC and DST are the same, {dst}; name another DST")
    if folder and (dst.is_file() or dst.suffix == ".onnx"):
        raise UsageError(f"SRC {src} is a folder, so DST {dst} must be a folder too")
    if not folder and dst.is_dir():
        raise UsageError(f"SRC {src} is a file, so DST {dst} must be a file too; it is a folder")
    for path in (dst,) if folder else (dst, external_data.data_path(dst)):
        if path.exists() and not (path.is_file() or folder):
            raise UsageError(f"DST {path} is a device or a pipe, which would be replaced; name a file")
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists already; pass --overwrite (overwrite=True) to replace it")
    home = dst if dst.is_dir() else dst.absolute().parent
    if not home.is_dir():
        raise FileNotFoundError(f"the folder {home} for DST does not exist; make it first")
    if not os.access(home, os.W_OK):
        raise PermissionError(f"the folder {home} for DST cannot be written; choose another one")
    return Paths(source, destination, folder)


def refuse_weights_as_target(paths: Paths, data_files: set[Path]) -> None:
    """Raise UsageError when writing DST would overwrite weights: of SRC, also those that a link leads to, or of others.

    Others are the models beside DST: one that was converted beside its source reads the data file of that.
    """
    data = external_data.data_path(paths.destination)
    for path in (paths.destination, data):
        if path.resolve() in data_files:
            raise UsageError(f"{path} holds the weights of {paths.source}; name another DST")
    for model in sorted(data.parent.glob("*.onnx")) if data.exists() else ():
        with suppress(ModelFileError):
            if model.name != paths.destination.name and data.resolve() in external_bytes(external_data.load(model)):
                raise UsageError(f"{data} holds weights of {model} as well; name another DST")


@contextmanager
def writing(paths: Paths) -> Iterator[Path]:
    """Yield the path to write the model to; an error in the body leaves what was there before.

    An output folder is filled aside and appears when it is complete.
    """
    if paths.folder is None:
        with restored_on_error(paths.destination, external_data.data_path(paths.destination)):
            yield paths.destination
        return
    with staging_folder(paths.folder) as staged:
        name = paths.destination.name
        yield staged / name
        publish(staged, paths.folder, last=name)


def copy_side_files(source: Path, folder: Path, data_files: set[Path]) -> None:
    """Copy the files beside `source` (tokenizer, configuration) into `folder`; models and their weights are not."""
    for path in source.parent.iterdir():
        if path.name == source.name or ".onnx" in path.name:
            continue
        if path.is_file() and path.resolve() not in data_files:
            shutil.copyfile(path, folder / path.name)


def external_bytes(model: ir.Model) -> dict[Path, int]:
    """The data files, links resolved, that initializers of `model` lie in, and the bytes that these take there."""
    tensors = (v.const_value for graph in model.graphs() for v in graph.initializers.values())
    outside = [t for t in tensors if isinstance(t, ir.ExternalTensor) and not isinstance(t, InlineTensor)]
    files = {path: Path(path).resolve() for path in {t.path for t in outside}}
    places = {(files[t.path], t.offset, t.nbytes) for t in outside}
    found: dict[Path, int] = {}
    for path, _, count in places:
        found[path] = found.get(path, 0) + count
    return found


def use_of_files(written: Path) -> tuple[int, list[DataFile]]:
    """Bytes of a model just written, and what it reads of the data files of its source; that counts too."""
    own = external_data.data_path(written).resolve()
    sizes = external_bytes(external_data.load(written))
    reads = [DataFile(str(path), count) for path, count in sorted(sizes.items()) if path != own]
    files = [written, own] if own in sizes else [written]
    return sum(path.stat().st_size for path in files) + sum(file.bytes for file in reads), reads

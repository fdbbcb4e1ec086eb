"""Write files so that a reader, a crash or an interrupt never leaves or sees half of one."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Make `folder` and its parents where they are missing; those that were made go again when the body fails."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    made: list[Path] = []
    try:
        for path in reversed(missing):
            path.mkdir()
            made.append(path)
        yield
    except BaseException:
        for path in reversed(made):
            with suppress(OSError):  # it holds something by now
                path.rmdir()
        raise


@contextmanager
def staging_folder(destination: Path) -> Iterator[Path]:
    """Yield a new folder on the file system of the folder `destination`; it is gone afterwards, whatever happens.

    Raises OSError, naming `destination`, when no folder can be made there.
    """
    home = destination if destination.is_dir() else destination.parent
    folder = home / f".{destination.name}.{secrets.token_hex(4)}.partial"
    try:
        folder.mkdir()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(destination)) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def restored_on_error(*paths: Path) -> Iterator[None]:
    """Undo what the body did to the files `paths` when it fails: old ones come back, new ones go."""
    kept = {path: path.with_name(f".{path.name}.{secrets.token_hex(4)}.previous") for path in paths if path.exists()}
    try:
        for path, previous in kept.items():
            _link_or_copy(path, previous)
        with _undone_on_error(paths, kept):
            yield
    finally:
        for previous in kept.values():
            previous.unlink(missing_ok=True)


@contextmanager
def _undone_on_error(paths: tuple[Path, ...], kept: dict[Path, Path]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with _without_interrupts():
            for path in paths:
                if path in kept:
                    os.replace(kept[path], path)
                else:
                    path.unlink(missing_ok=True)
        raise


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def publish(staged: Path, folder: Path, last: str) -> None:
    """Move every file of `staged` into `folder` (made if missing), replacing files of the same name; `last` goes last.

    A model is thus never visible before its data. Ctrl-C and SIGTERM are ignored meanwhile: these are renames only.
    """
    with _without_interrupts():
        folder.mkdir(exist_ok=True)
        for path in sorted(staged.iterdir(), key=lambda p: (p.name == last, p.name)):
            os.replace(path, folder / path.name)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

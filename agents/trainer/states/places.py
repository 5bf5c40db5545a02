"""Where checkpoints are: a directory, or a prefix of an object store by an fsspec URL (`s3://bucket/prefix`).

Rules
-----
* Names are relative to the place, with "/" between their parts. A checkpoint is `iteration-<number>`; it is there when
  its manifest is, and whole when all that the manifest names is.
* A directory is written as a draft, synced, and renamed. An object store renames nothing: shards are uploaded to
  `iteration-<number>/<attempt>/`, the manifest, which names the attempt, is uploaded last. So an upload that was torn
  is no checkpoint, and one that is made again leaves the one before whole until the last moment.
* In an object store nothing is read, moved or deleted but objects of the names that are given here: a bucket may hold
  others' as well.
* Credentials, endpoint and the like are those that fsspec and the store's own library find in the environment, in their
  files or at the instance. None of these are read or written here.

What a checkpoint consists of: `checkpoint.py`.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from unicrond.events.host import optional_dependencies as extras
from unicrond.events.vocabulary.tasks import is_url

MANIFEST = "manifest.json"
NAME = re.compile(r"^iteration-([0-9]{8,})$")
#: Of a checkpoint's own, with the files of the attempt that was published; "": there is none.
FOLDER = re.compile(r"(try-[A-Za-z0-9_-]+)?")
_DRAFT = re.compile(r"^\.draft-([0-9]{8,})-")
#: What this module puts below `iteration-<number>/` in an object store.
_OBJECT_NAME = re.compile(
    r"(manifest\.json|made-with\.json"
    r"|try-[A-Za-z0-9_-]+/(publisher|made-with\.json|shard-[0-9]+\.json|shard-[0-9]+/(\.metadata|__[0-9]+_[0-9]+\.distcp)))"
)
_SCRATCH = "unicron-state-"


def name_of(iteration: int) -> str:
    """Return the name of the checkpoint after `iteration`."""
    return f"iteration-{iteration:08d}"


class StatePlace(ABC):
    """Keep checkpoints. Every method raises OSError where the place fails."""

    @abstractmethod
    def iterations(self) -> list[int]:
        """Return the iterations of all checkpoints, newest first."""

    @abstractmethod
    def content(self, name: str) -> bytes:
        """Return the content of a small file."""

    @abstractmethod
    def sizes_bytes(self, folder: str) -> dict[str, int]:
        """Return the size of each file in the folders of a folder, by name ("shard-0/.metadata")."""

    @abstractmethod
    def files(self, folder: str, names: Iterable[str]) -> Any:
        """Enter with a path under which these files of a checkpoint's folder can be read."""

    @abstractmethod
    def workspace(self, folder: str) -> Any:
        """Enter with an empty directory; what is put there is in `folder` of the place after the exit."""

    @abstractmethod
    def draft(self, iteration: int, attempt: str) -> tuple[str, str]:
        """Return the folder of the files of a checkpoint that is not published, made if need be, and where the
        checkpoint, once published, has them below its own name."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a small file; it is complete, or not there."""

    @abstractmethod
    def claim(self, name: str, claimant: str) -> bool:
        """Make a file that names the claimant; return True to exactly one of them, however often it asks: its last
        answer may have been lost, or what it claimed the file for may have failed."""

    @abstractmethod
    def publish(self, draft: str, iteration: int, texts: Mapping[str, bytes], *, replace: bool = True) -> None:
        """Make a draft the checkpoint after `iteration`, with these small files, MANIFEST the last of them, the others
        beside the draft's own. Unless it may `replace` one, the first stays."""

    @abstractmethod
    def move(self, iteration: int, archive: str) -> str:
        """Move a checkpoint into the folder `archive`, or one beside it where that has one of its name; return where it
        is, "" where another worker has moved it."""

    @abstractmethod
    def remove(self, iteration: int) -> None:
        """Remove a checkpoint, as far as that can be done."""

    @abstractmethod
    def remove_draft(self, iteration: int, attempt: str) -> None:
        """Remove the files of an attempt that is over, as far as that can be done; none of what may be published."""

    @abstractmethod
    def remove_drafts(self, before: int) -> None:
        """Remove drafts of lower iterations: writers that died have left them."""

    @abstractmethod
    def path_of(self, name: str) -> str:
        """Return the path or URL of a name, for people."""


def place_of(text: str | Path) -> StatePlace:
    """Return the place that a path or URL names. Raises OSError where what it needs is not installed."""
    return ObjectPrefix(str(text)) if is_url(str(text)) else StateDirectory(Path(text))


class StateDirectory(StatePlace):
    """Keep checkpoints in a directory that all nodes see."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def iterations(self) -> list[int]:
        """List the directories of that name."""
        if not self._directory.is_dir():
            return []
        return sorted((int(m[1]) for path in self._directory.iterdir() if (m := NAME.match(path.name))), reverse=True)

    def content(self, name: str) -> bytes:
        """Read the file."""
        return (self._directory / name).read_bytes()

    def sizes_bytes(self, folder: str) -> dict[str, int]:
        """Ask for each file's size."""
        sizes_bytes = {}
        for file in (file for path in (self._directory / folder).iterdir() if path.is_dir() for file in path.iterdir()):
            with suppress(FileNotFoundError):  # a link to nothing, or another program's that has gone meanwhile
                sizes_bytes[f"{file.parent.name}/{file.name}"] = file.stat().st_size
        return sizes_bytes

    @contextmanager
    def files(self, folder: str, names: Iterable[str]) -> Iterator[Path]:
        """Enter with the files where they lie."""
        yield self._directory / folder

    @contextmanager
    def workspace(self, folder: str) -> Iterator[Path]:
        """Enter with the directory itself, and sync it."""
        directory = self._directory / folder
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        yield directory
        _sync(directory)

    def draft(self, iteration: int, attempt: str) -> tuple[str, str]:
        """Make a directory that has no checkpoint's name."""
        name = _draft_name(iteration, attempt)
        (self._directory / name).mkdir(parents=True, exist_ok=True)
        return name, ""

    def write(self, name: str, data: bytes) -> None:
        """Write another name first, and sync."""
        path = self._directory / name
        new = path.with_name(path.name + ".new")
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)

    def claim(self, name: str, claimant: str) -> bool:
        """Make a file that must not be there."""
        path = self._directory / name
        path = path.with_name(f".{path.name}")
        try:
            with path.open("x") as file:
                file.write(claimant)
        except FileExistsError:
            with suppress(FileNotFoundError):
                return path.read_text() == claimant
            return False
        except OSError:
            if path.parent.is_dir():
                raise
            return False  # the draft has its final name already
        return True

    def publish(self, draft: str, iteration: int, texts: Mapping[str, bytes], *, replace: bool = True) -> None:
        """Give the draft its name."""
        for name, content in texts.items():
            self.write(f"{draft}/{name}", content)
        path, final = self._directory / draft, self._directory / name_of(iteration)
        _sync(path)
        try:
            path.rename(final)
        except OSError:  # an earlier run's checkpoint stands there
            if not replace and final.is_dir():
                shutil.rmtree(path, ignore_errors=True)
                return
            old = path.with_name(path.name + ".old")
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
            path.rename(final)
            shutil.rmtree(old, ignore_errors=True)
        _sync(self._directory)

    def move(self, iteration: int, archive: str) -> str:
        """Rename the directory."""
        path = self._directory / name_of(iteration)
        directory, number = self._directory / archive, 1
        while (directory / path.name).exists():
            number += 1
            directory = self._directory / f"{archive}-{number}"
        directory.mkdir(exist_ok=True)
        try:
            path.rename(directory / path.name)
        except FileNotFoundError:
            return ""
        return str(directory / path.name)

    def remove(self, iteration: int) -> None:
        """Remove the directory."""
        shutil.rmtree(self._directory / name_of(iteration), ignore_errors=True)

    def remove_draft(self, iteration: int, attempt: str) -> None:
        """Remove the directory; a published one has another name."""
        shutil.rmtree(self._directory / _draft_name(iteration, attempt), ignore_errors=True)

    def remove_drafts(self, before: int) -> None:
        """Remove directories of older drafts."""
        for path in self._directory.iterdir():
            match = _DRAFT.match(path.name)
            if match and int(match[1]) < before:
                shutil.rmtree(path, ignore_errors=True)

    def path_of(self, name: str) -> str:
        """Return the path."""
        return str(self._directory / name)


class ObjectPrefix(StatePlace):
    """Keep checkpoints below a prefix of an object store. A shard's files pass through a directory of this node's
    (TMPDIR), which needs room for them."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        try:
            import fsspec

            # No cache: other writers' objects must be seen, and a listing must not outlive what it lists.
            self._store, self._root = fsspec.core.url_to_fs(self._url, use_listings_cache=False)
        except (ImportError, ValueError) as error:  # fsspec itself, or the scheme's own package
            raise OSError(
                f"checkpoint.dir: {self._url} needs the extra `object-store` on every node: "
                f"{extras.install_command('object-store')} ({error})"
            ) from None

    def iterations(self) -> list[int]:
        """List the prefixes of that name with a manifest."""
        return sorted((number for number in self._numbers() if self._ask("exists", self._at(number))), reverse=True)

    def content(self, name: str) -> bytes:
        """Read the object."""
        return bytes(self._ask("cat_file", f"{self._root}/{name}"))

    def sizes_bytes(self, folder: str) -> dict[str, int]:
        """List the objects, at once."""
        prefix = f"{self._root}/{folder}/"
        objects = self._ask("find", prefix, detail=True)
        return {path.partition(prefix)[2]: int(info["size"]) for path, info in objects.items()}

    @contextmanager
    def files(self, folder: str, names: Iterable[str]) -> Iterator[Path]:
        """Enter with copies of the files."""
        with _scratch() as directory:
            for name in names:
                path = directory / name
                path.parent.mkdir(exist_ok=True)
                self._ask("get_file", f"{self._root}/{folder}/{name}", str(path))
            yield directory

    @contextmanager
    def workspace(self, folder: str) -> Iterator[Path]:
        """Enter with a directory of this node's, and upload what it has then."""
        with _scratch() as directory:
            yield directory
            for path in sorted(directory.iterdir()):
                self._ask("put_file", str(path), f"{self._root}/{folder}/{path.name}")

    def draft(self, iteration: int, attempt: str) -> tuple[str, str]:
        """Name a folder of the checkpoint's own."""
        return f"{name_of(iteration)}/try-{attempt}", f"try-{attempt}"

    def write(self, name: str, data: bytes) -> None:
        """Put the object, which is there as a whole or not at all."""
        self._ask("pipe_file", f"{self._root}/{name}", data)

    def claim(self, name: str, claimant: str) -> bool:
        """Put an object that must not be there."""
        try:
            self._ask("pipe_file", f"{self._root}/{name}", claimant.encode(), mode="create")
        except FileExistsError:
            return self.content(name) == claimant.encode()
        return True

    def publish(self, draft: str, iteration: int, texts: Mapping[str, bytes], *, replace: bool = True) -> None:
        """Put the manifest, after all else."""
        if not replace and self._ask("exists", self._at(iteration)):
            return
        for name in sorted(texts, key=lambda name: name == MANIFEST):
            self.write(f"{name_of(iteration) if name == MANIFEST else draft}/{name}", texts[name])

    def move(self, iteration: int, archive: str) -> str:
        """Copy all of it, its manifest last, and remove what was copied."""
        source, directory, number = name_of(iteration), archive, 1
        while self._ask("exists", f"{self._root}/{directory}/{source}/{MANIFEST}"):
            number += 1
            directory = f"{archive}-{number}"
        names = self._own_names(iteration)
        if MANIFEST not in names:
            return ""
        for name in sorted(names, key=lambda name: name == MANIFEST):
            self._ask("cp_file", f"{self._root}/{source}/{name}", f"{self._root}/{directory}/{source}/{name}")
        self.remove(iteration)
        return self.path_of(f"{directory}/{source}")

    def remove(self, iteration: int) -> None:
        """Remove its own objects, its manifest first."""
        names = self._own_names(iteration)
        for name in sorted(names, key=lambda name: name != MANIFEST):  # without its manifest it is none any more
            with suppress(FileNotFoundError):
                self._ask("rm_file", f"{self._root}/{name_of(iteration)}/{name}")

    def remove_draft(self, iteration: int, attempt: str) -> None:
        """Remove its objects, unless there is a manifest, which may name them."""
        with suppress(OSError):
            if not self._ask("exists", self._at(iteration)):
                for name in self._own_names(iteration):
                    if name.startswith(f"try-{attempt}/"):
                        self._ask("rm_file", f"{self._root}/{name_of(iteration)}/{name}")

    def remove_drafts(self, before: int) -> None:
        """Remove what has no manifest and is older."""
        for number in self._numbers():
            if number < before and not self._ask("exists", self._at(number)):
                self.remove(number)

    def path_of(self, name: str) -> str:
        """Return the URL."""
        return f"{self._url}/{name}"

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        try:
            return getattr(self._store, method)(*arguments, **options)
        except OSError:
            raise
        except Exception as error:  # the stores' libraries have types of their own
            raise OSError(f"{self._url}: {type(error).__name__}: {error}") from None

    def _at(self, iteration: int) -> str:
        return f"{self._root}/{name_of(iteration)}/{MANIFEST}"

    def _numbers(self) -> list[int]:
        """Return the numbers of all that has a checkpoint's name, published or not."""
        try:
            paths = self._ask("ls", self._root, detail=False)
        except FileNotFoundError:
            return []
        matches = (NAME.match(path.rstrip("/").rpartition("/")[2]) for path in paths)
        return [int(match[1]) for match in matches if match]

    def _own_names(self, iteration: int) -> list[str]:
        folder = f"{self._root}/{name_of(iteration)}/"
        names = (path.partition(folder)[2] for path in self._ask("find", folder))
        return [name for name in names if _OBJECT_NAME.fullmatch(name)]


def _draft_name(iteration: int, attempt: str) -> str:
    return f".draft-{iteration:08d}-{attempt}"


@contextmanager
def _scratch() -> Iterator[Path]:
    """Make a directory of this node's. Those that killed workers have left are removed first: the kernel has lifted
    their locks."""
    for path in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with suppress(OSError), _locked(path):
            shutil.rmtree(path, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix=f".{_SCRATCH}"))
    with _locked(new):  # before others look for it
        directory = new.rename(new.with_name(new.name.removeprefix(".")))
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

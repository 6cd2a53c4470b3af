"""Tests of watched files, and of files that are stored completely or not at all."""

# ruff: noqa: ASYNC240 - a small local file does not block the event loop

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_clock import FakeClock
from waiting import until

from encserve_server.system import files, watched_files
from encserve_server.system.files import FileError, read_files, store_whole
from encserve_server.system.watched_files import Contents, WatchedFiles


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: None, "No such file or directory"),
        (os.mkfifo, "must be a regular file; is a FIFO"),
        (os.mkdir, "must be a regular file; is a folder"),
        (make_socket, "must be a regular file; is a socket"),
        (lambda path: path.symlink_to("/dev/zero"), "must be a regular file; is a character device"),
        (lambda path: path.write_bytes(b"x" * (4 * 1024 * 1024 + 1)), "must be at most 4194304 bytes; is larger"),
    ],
)
def test_a_wrong_file_is_refused_with_its_kind(
    path: Path, make: Callable[[Path], object], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)  # the path of a socket must be short
    make(Path(path.name))
    with pytest.raises(FileError) as caught:
        read_files({"--callers": path})
    assert str(caught.value) == f"--callers {path} cannot be read: {problem}"


def test_a_link_and_the_largest_file_are_read(path: Path) -> None:
    """A symbolic link is accepted, because Kubernetes mounts files as links."""
    path.with_name("link").symlink_to(path)
    path.write_bytes(b"x" * (4 * 1024 * 1024))
    assert read_files({"--callers": path.with_name("link")}) == (path.read_bytes(),)


class Watch:
    """Watched files with a fake clock. For each change, `events` has the new contents or the problem."""

    def __init__(self, *paths: Path) -> None:
        self.clock = FakeClock()
        self.files = WatchedFiles({f"--{path.name}": path for path in paths})
        self.files.read_first()
        self.events: list[Contents | str] = []

    async def look(self, meanwhile: Callable[[], object] = lambda: None) -> list[Contents | str]:
        """Check the files once, and return the events. If the check finds a change, `meanwhile` runs in its pause."""
        look = asyncio.create_task(self._look())
        await until(lambda: look.done() or self.clock.sleepers)
        meanwhile()
        self.clock.advance(1)
        await look
        return self.events

    async def _look(self) -> None:
        try:
            contents = await self.files.changed(self.clock)
        except FileError as error:
            self.events.append(str(error))
        else:
            if contents is not None:
                self.events.append(contents)


async def test_a_change_counts_once(path: Path) -> None:
    other = path.with_name("other")
    path.write_bytes(b"a")
    other.write_bytes(b"b")
    watch = Watch(path, other)
    assert await watch.look() == []
    other.write_bytes(b"c")
    for _ in range(2):
        assert await watch.look() == [(b"a", b"c")]
    other.unlink()
    problem = f"--other {other} cannot be read: No such file or directory"
    for _ in range(2):
        assert await watch.look() == [(b"a", b"c"), problem]
    other.write_bytes(b"c")
    for _ in range(2):
        assert await watch.look() == [(b"a", b"c"), problem, (b"a", b"c")]


async def test_an_incomplete_file_is_not_a_change(path: Path) -> None:
    path.write_bytes(b"whole")
    watch = Watch(path)
    path.write_bytes(b"ha")
    assert await watch.look(lambda: path.write_bytes(b"half")) == []
    path.unlink()
    assert await watch.look(lambda: path.write_bytes(b"whole")) == []  # removed, then written again
    path.write_bytes(b"other")
    assert await watch.look() == [(b"other",)]


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let reads hang while the event is not set, as on a network disk whose server is down."""
    ends, read = threading.Event(), files.read_small

    def hanging_read(path: Path) -> bytes:
        assert ends.wait(60)
        return read(path)

    ends.set()
    monkeypatch.setattr(files, "read_small", hanging_read)
    yield ends
    ends.set()


def reading_threads() -> int:
    return sum(it.name == "encserve-files" for it in threading.enumerate())


async def test_a_hanging_read_is_reported_until_the_read_ends(
    path: Path, hang: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a read hangs, the event loop continues, and no second reading thread starts."""
    path.write_bytes(b"a")
    watch = Watch(path)
    hang.clear()
    problem = f"--file {path} could not be read in 0.02 s; look at the file system"
    with monkeypatch.context() as short:
        short.setattr(watched_files, "READ_SECONDS", 0.02)
        for _ in range(3):
            assert await watch.look() == [problem]
    assert reading_threads() == 1
    path.write_bytes(b"b")
    hang.set()
    await until(lambda: not reading_threads())
    assert await watch.look() == [problem, (b"b",)]


def test_a_hanging_read_stops_the_start(path: Path, hang: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "READ_SECONDS", 0.02)
    hang.clear()
    with pytest.raises(FileError, match=r"could not be read in 0.02 s"):
        WatchedFiles({"--callers": path}).read_first()


@pytest.mark.parametrize("is_folder", [False, True])
def test_an_entry_is_stored_completely_or_not_at_all(path: Path, is_folder: bool) -> None:
    def write(draft: Path) -> None:
        assert not path.exists()
        if is_folder:
            draft.mkdir()
            draft /= "part"
        draft.write_text("new")

    def fail(draft: Path) -> None:
        draft.write_text("half")
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        store_whole(path, fail)
    assert list(path.parent.iterdir()) == []
    store_whole(path, write)
    assert list(path.parent.iterdir()) == [path]
    assert (path / "part" if is_folder else path).read_text() == "new"

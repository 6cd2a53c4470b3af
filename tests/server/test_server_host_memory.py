"""Memory that is lent for results: whose it is at every moment, and that results in it are the engine's own."""

import contextlib
import ctypes
import gc
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_bundle import VOCAB_SIZE, expected_rows, write_bundle

from encserve_server.bundle import Bundle, read_bundle
from encserve_server.engine import host_memory
from encserve_server.engine.host_memory import CudaAllocator, HostMemory, page_locked_memory
from encserve_server.engine.onnx import OnnxEngine

KIB = 1024
WARNING = "page-locked memory cannot be had: copies from the GPU are slower"


class Pages:
    """Ordinary memory by its address, as a page-locking library gives it; a block that was freed is overwritten."""

    def __init__(self, most_bytes: int = 1 << 40) -> None:
        self.taken: dict[int, ctypes.Array[ctypes.c_byte]] = {}
        self.freed = 0
        self.asked = 0
        self.most_bytes = most_bytes

    def allocate(self, n_bytes: int) -> int:
        self.asked += 1
        if sum(map(len, self.taken.values())) + n_bytes > self.most_bytes:
            raise OSError("out of memory (2)")
        block = (ctypes.c_byte * n_bytes)()
        address = ctypes.addressof(block)
        self.taken[address] = block
        return address

    def free(self, address: int) -> None:
        block = self.taken.pop(address)
        ctypes.memset(block, 0xFF, len(block))
        self.freed += 1


def inside(array: np.ndarray, pages: Pages) -> bool:
    """Whether an array lies in the memory of `pages`."""
    at = array.ctypes.data
    return any(start <= at < start + len(block) for start, block in pages.taken.items())


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return read_bundle(write_bundle(tmp_path_factory.mktemp("models")))


def test_what_nobody_refers_to_is_lent_again() -> None:
    pages = Pages()
    memory = HostMemory(pages)
    first = memory.lend((3, 5, 8))
    assert first.shape == (3, 5, 8)
    assert first.dtype == np.float32
    assert inside(first, pages)
    row = first[1, :2][1:]  # a view of a view keeps it
    address = first.ctypes.data
    del first
    assert memory.lend((3, 5, 8)).ctypes.data != address
    del row
    assert address in {memory.lend((3, 5, 8)).ctypes.data for _ in range(2)}
    assert (pages.asked, memory.taken_bytes) == (2, 2 * 64 * KIB)


@given(shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 100), st.integers(1, 60)), min_size=1, max_size=20))
def test_arrays_that_live_at_the_same_time_share_nothing(shapes: list[tuple[int, int, int]]) -> None:
    pages = Pages()
    memory = HostMemory(pages)
    for _ in range(2):  # the second time in memory that was used before
        lent = [memory.lend(shape) for shape in shapes]
        for number, array in enumerate(lent):
            array[...] = number
        assert [array.shape for array in lent] == shapes
        assert all((array == number).all() for number, array in enumerate(lent))
        assert all(inside(array, pages) for array in lent)
        del array
    assert memory.taken_bytes == sum(map(len, pages.taken.values()))


def test_beyond_its_bound_memory_is_ordinary(caplog: pytest.LogCaptureFixture) -> None:
    pages = Pages()
    memory = HostMemory(pages, most_bytes=100 * KIB)
    kept = [memory.lend((10, 10)) for _ in range(3)]
    assert [inside(array, pages) for array in kept] == [True, False, False]
    (record,) = caplog.records  # once
    assert record.message == WARNING
    assert getattr(record, "reason", "") == "65536 bytes are taken, of at most 102400"
    assert inside(HostMemory(pages).lend((1,)), pages)
    assert not inside(HostMemory(pages, most_bytes=0).lend((1,)), pages)
    assert memory.lend((0, 4)).shape == (0, 4)


def test_blocks_of_one_size_make_room_for_another() -> None:
    """Or many small batches would make every large one slow, for good."""
    pages = Pages()
    memory = HostMemory(pages, most_bytes=1024 * KIB)
    small = [memory.lend((10, 10)) for _ in range(16)]
    kept = small.pop()
    kept[...] = 7
    del small
    large = memory.lend((300, 400))
    assert inside(large, pages)
    large[...] = 1
    assert (kept == 7).all()
    assert memory.taken_bytes == sum(map(len, pages.taken.values())) <= 1024 * KIB
    assert not inside(memory.lend((300, 400)), pages)


def test_nothing_is_freed_where_it_cannot_be_enough() -> None:
    """Each block costs milliseconds to lock."""
    pages = Pages()
    memory = HostMemory(pages, most_bytes=1024 * KIB)
    kept = [memory.lend((200, 256)) for _ in range(3)]  # 3 x 256 KiB
    for _ in range(20):
        assert inside(memory.lend((10, 10)), pages)
        assert not inside(memory.lend((400, 256)), pages)
    assert (pages.asked, pages.freed) == (4, 0)
    del kept


def test_a_larger_block_serves_where_there_is_no_other() -> None:
    pages = Pages()
    memory = HostMemory(pages, most_bytes=600 * KIB)
    address = memory.lend((400, 256)).ctypes.data  # 512 KiB, given back at once
    held = [memory.lend((10, 10))]
    lent = memory.lend((200, 256))
    assert lent.ctypes.data == address
    assert lent.shape == (200, 256)
    assert (pages.asked, pages.freed) == (2, 0)
    del held


def test_where_no_more_can_be_locked_it_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    pages = Pages(most_bytes=64 * KIB)
    memory = HostMemory(pages)
    with caplog.at_level(logging.WARNING):
        kept = [memory.lend((10, 10)) for _ in range(4)]
    assert [inside(array, pages) for array in kept] == [True, False, False, False]
    (record,) = caplog.records  # and is not asked for again
    assert (record.message, pages.asked) == (WARNING, 2)
    del kept
    assert inside(memory.lend((10, 10)), pages)


def test_closing_frees_what_is_lent_when_it_comes_back() -> None:
    pages = Pages()
    memory = HostMemory(pages)
    free, lent = memory.lend((2, 2)), memory.lend((2, 2))
    lent[...] = 7
    del free
    memory.close()
    assert (len(pages.taken), pages.freed) == (1, 1)
    assert (lent == 7).all()
    del lent
    assert (len(pages.taken), pages.freed) == (0, 2)


def test_many_threads_never_get_the_same_memory() -> None:
    pages = Pages()
    memory = HostMemory(pages)

    def use(number: int) -> bool:
        kept = []
        for step in range(200):
            array = memory.lend((1 + (number + step) % 7, 50, 100))
            array[...] = number * 1000 + step
            kept.append((number * 1000 + step, array[-1]))
            if len(kept) > 3:
                expected, row = kept.pop(0)
                if not (row == expected).all():
                    return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(use, range(8)))
    gc.collect()
    assert memory.taken_bytes == sum(map(len, pages.taken.values()))
    memory.close()
    assert not pages.taken


@settings(deadline=None)  # the first run of a shape takes longer, and so does a busy machine
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), seed=st.integers(0, 9))
def test_an_engine_writes_its_results_there(bundle: Bundle, lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = [rng.integers(0, VOCAB_SIZE, length) for length in lengths]
    pages = Pages()
    with contextlib.closing(
        OnnxEngine(bundle.graph, device="cpu", intra_op_threads=1, results=HostMemory(pages))
    ) as engine:
        before = engine.run(batch).rows
        again = engine.run(batch[::-1]).rows[::-1]
    for ids, rows, others in zip(batch, before, again, strict=True):
        assert inside(rows, pages)
        np.testing.assert_allclose(rows, expected_rows(ids), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(rows, others)
    del before, again, rows, others
    assert not pages.taken  # the engine closed it


def test_batches_at_once_keep_their_own_results(bundle: Bundle) -> None:
    rng = np.random.default_rng(0)
    batches = [[rng.integers(0, VOCAB_SIZE, length) for length in rng.integers(1, 40, 5)] for _ in range(200)]
    with (
        contextlib.closing(
            OnnxEngine(
                bundle.graph, device="cpu", intra_op_threads=4, parallel_runs=4, results=HostMemory(pages := Pages())
            )
        ) as engine,
        ThreadPoolExecutor(4) as threads,
    ):
        for batch, result in zip(batches, threads.map(partial(engine.run, alone=False), batches), strict=True):
            for ids, rows in zip(batch, result.rows, strict=True):
                np.testing.assert_allclose(rows, expected_rows(ids), rtol=1e-5, atol=1e-6)
    assert pages.asked <= len(batches)


def test_a_run_that_fails_gives_its_memory_back(bundle: Bundle) -> None:
    pages = Pages()
    engine = OnnxEngine(bundle.graph, device="cpu", intra_op_threads=1, results=HostMemory(pages))
    with contextlib.closing(engine):
        for _ in range(3):
            with pytest.raises(Exception, match="indices element out of data bounds"):
                engine.run([np.array([VOCAB_SIZE], np.int64)])
        assert pages.asked == 1
        (rows,) = engine.run([np.array([1], np.int64)]).rows
        np.testing.assert_allclose(rows, expected_rows(np.array([1])), rtol=1e-5, atol=1e-6)


def test_an_output_of_another_shape_is_an_error_and_overwrites_nothing(bundle: Bundle) -> None:
    """A manifest that says the wrong width must not write beyond what was lent."""
    pages = Pages()
    graph = replace(bundle.graph, d_model=bundle.graph.d_model - 1)
    engine = OnnxEngine(graph, device="cpu", intra_op_threads=1, results=HostMemory(pages))
    with contextlib.closing(engine), pytest.raises(Exception, match="invalid dimensions"):
        engine.run([np.array([1, 2, 3], np.int64)])


def test_the_library_is_asked_as_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's library needs a driver; this one has its two functions."""
    library = FakeCuda()
    monkeypatch.setattr(host_memory, "_open_library", lambda: library)
    memory = HostMemory(CudaAllocator())
    array = memory.lend((4, 4))
    array[...] = 1
    assert inside(array, library.pages)
    assert library.asked == [(64 * KIB, 1)]  # portable: for whichever thread copies
    memory.close()
    del array
    assert library.pages.freed == 1


def test_a_library_that_locks_nothing_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = FakeCuda(most_bytes=0)
    monkeypatch.setattr(host_memory, "_open_library", lambda: library)
    memory = page_locked_memory()
    assert memory is not None
    assert memory.lend((4, 4)).shape == (4, 4)
    assert library.last_error == 0, "the next kernel of this thread would take it for its own"
    (record,) = caplog.records
    assert getattr(record, "reason", "") == "cudaHostAlloc of 65536 bytes: out of memory (2)"


def test_without_the_library_there_is_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(host_memory, "_LIBRARIES", ("libabsent.so.13", "libabsent.so.12"))
    assert page_locked_memory() is None
    (record,) = caplog.records
    assert getattr(record, "reason", "") == "cannot load libabsent.so.13 or libabsent.so.12"


class FakeCuda:
    """cudaHostAlloc and cudaFreeHost, with the arguments and the codes of the real ones."""

    class _Function:
        restype: object = None

        def __call__(self, code: int) -> bytes:
            return {2: b"out of memory"}[code]

    def __init__(self, most_bytes: int = 1 << 40) -> None:
        self.pages = Pages(most_bytes)
        self.asked: list[tuple[int, int]] = []
        self.last_error = 0  # as each thread has one: it stays until somebody asks for it
        self.cudaGetErrorString = self._Function()

    def cudaHostAlloc(self, address: object, size: ctypes.c_size_t, flags: ctypes.c_uint) -> int:  # noqa: N802
        self.asked.append((size.value, flags.value))
        try:
            address._obj.value = self.pages.allocate(size.value)  # type: ignore[attr-defined]
        except OSError:
            self.last_error = 2
            return 2
        return 0

    def cudaGetLastError(self) -> int:  # noqa: N802
        error, self.last_error = self.last_error, 0
        return error

    def cudaFreeHost(self, address: ctypes.c_void_p) -> int:  # noqa: N802
        assert address.value is not None
        self.pages.free(address.value)
        return 0

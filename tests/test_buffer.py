"""Does `DeviceBuffer` keep its contract on every provider: one owner, one free, no use after it?"""

import ctypes
import gc
import mmap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from arrays import PROVIDERS, borrowed, content

from ep import discovery
from ep.buffer import DeviceBuffer, leaks
from ep.device import DeviceId
from ep.errors import (
    DoubleFree,
    ForeignProvider,
    InvalidAlignment,
    InvalidInput,
    NullPointer,
    OutOfMemory,
    ReadOnlyBuffer,
    UseAfterFree,
)

CPU = DeviceId.cpu()


@pytest.fixture(params=PROVIDERS)
def provider(request):
    made = discovery.provider(request.param)
    yield made
    made.shutdown()


def raw(array, align=1):
    """An owning handle of memory that `array` frees in the end, as the C heap would."""
    return DeviceBuffer.from_raw_parts(array.ctypes.data, CPU, array.nbytes, align)


def filled(provider, data):
    """A buffer of the provider that holds these bytes."""
    source = np.frombuffer(data, np.uint8)
    buffer = provider.allocate(len(data), 16)
    provider.copy(borrowed(source), buffer, len(data))
    return buffer


class TestHandle:
    def test_metadata_and_single_free(self, provider):
        buffer = provider.allocate(128, 64)
        assert (len(buffer), buffer.alignment, buffer.device) == (128, 64, provider.device_id)
        assert not buffer.is_empty and not buffer.is_borrowed and buffer.is_live
        assert buffer.as_ptr() and buffer.as_ptr() % 64 == 0
        provider.deallocate(buffer)
        assert not buffer.is_live

    def test_an_empty_buffer_has_an_address_and_is_true(self, provider):
        buffer = provider.allocate(0, 8)
        assert len(buffer) == 0 and buffer.is_empty and buffer and buffer.as_ptr()
        provider.deallocate(buffer)

    @pytest.mark.parametrize("pointer", [None, 0])
    @pytest.mark.parametrize("make", [DeviceBuffer.from_raw_parts, DeviceBuffer.from_borrowed_parts])
    def test_null_is_refused(self, make, pointer):
        with pytest.raises(NullPointer):
            make(pointer, CPU, 4, 1)

    @pytest.mark.parametrize("align", [0, -1, 3, 48])
    def test_alignment_must_be_a_power_of_two(self, provider, align):
        with pytest.raises(InvalidAlignment, match="not a power of two"):
            provider.allocate(64, align)
        with pytest.raises(InvalidAlignment, match="not a power of two"):
            DeviceBuffer.from_raw_parts(4096, CPU, 4, align)

    def test_the_address_must_keep_the_promised_alignment(self):
        with pytest.raises(InvalidAlignment, match="4 bytes past a multiple of 8"):
            DeviceBuffer.from_borrowed_parts(4100, CPU, 4, 8)

    @pytest.mark.parametrize("align", [1, 2, 16, 64, 256, 4096, 1 << 16])
    @pytest.mark.parametrize("size", [0, 1, 63, 4097])
    def test_alignment_is_honoured_also_after_writes(self, provider, align, size):
        buffers = [provider.allocate(size, align) for _ in range(3)]
        source = np.arange(size, dtype=np.uint32).astype(np.uint8)
        for buffer in buffers:
            assert buffer.as_ptr() % align == 0
            for part in {size, size // 2}:
                provider.copy(borrowed(source), buffer, part) if part else None
                assert buffer.as_ptr() % align == 0
            provider.deallocate(buffer)

    def test_buffers_do_not_overlap(self, provider):
        buffers = [filled(provider, bytes([n]) * 1000) for n in range(8)]
        assert [content(buffer) for buffer in buffers] == [bytes([n]) * 1000 for n in range(8)]
        list(map(provider.deallocate, buffers))

    def test_negative_size_is_refused(self, provider):
        with pytest.raises(InvalidInput, match="negative"):
            provider.allocate(-1, 8)


class TestMisuse:
    USES = {
        "as_ptr": lambda b: b.as_ptr(),
        "as_mut_ptr": lambda b: b.as_mut_ptr(),
        "into_raw": lambda b: b.into_raw(),
        "len": len,
        "is_empty": lambda b: b.is_empty,
        "device": lambda b: b.device,
        "alignment": lambda b: b.alignment,
        "is_borrowed": lambda b: b.is_borrowed,
    }

    @pytest.mark.parametrize("use", USES)
    def test_use_after_free(self, provider, use):
        buffer = provider.allocate(8, 8)
        provider.deallocate(buffer)
        with pytest.raises(UseAfterFree, match="deallocate consumed it"):
            self.USES[use](buffer)

    def test_copy_after_free(self, provider):
        live, freed = provider.allocate(8, 8), provider.allocate(8, 8)
        provider.deallocate(freed)
        for copy in (provider.copy, provider.copy_async):
            for pair in ((live, freed), (freed, live)):
                with pytest.raises(UseAfterFree):
                    copy(*pair, 8)
        provider.deallocate(live)

    def test_double_free(self, provider):
        buffer = provider.allocate(8, 8)
        provider.deallocate(buffer)
        with pytest.raises(DoubleFree, match="deallocate consumed it"):
            provider.deallocate(buffer)

    def test_free_after_into_raw(self, provider):
        buffer = provider.allocate(8, 8)
        rebuilt = DeviceBuffer.from_raw_parts(buffer.into_raw(), provider.device_id, 8, 8)
        with pytest.raises(DoubleFree, match="into_raw consumed it"):
            provider.deallocate(buffer)
        provider.deallocate(rebuilt)
        with pytest.raises(DoubleFree):
            provider.deallocate(rebuilt)

    def test_one_of_many_threads_frees(self, provider):
        for _ in range(20):
            buffer = provider.allocate(8, 8)
            start = threading.Barrier(4)

            def free(buffer=buffer, start=start):
                start.wait()
                try:
                    provider.deallocate(buffer)
                except DoubleFree:
                    return 0
                return 1

            with ThreadPoolExecutor(4) as pool:
                assert sum(pool.map(lambda _: free(), range(4))) == 1

    @pytest.mark.parametrize("other", PROVIDERS)
    def test_foreign_provider(self, provider, other):
        """Another instance is foreign even if it is of the same kind, on the same device."""
        stranger = discovery.provider(other)
        buffer = filled(provider, b"mine")
        with pytest.raises(ForeignProvider, match=f"{other}.*cannot deallocate"):
            stranger.deallocate(buffer)
        assert content(buffer) == b"mine"  # the refused free consumed nothing
        provider.deallocate(buffer)
        stranger.shutdown()

    def test_memory_of_nobody_is_foreign(self, provider):
        memory = np.zeros(8, np.uint8)
        buffer = raw(memory)
        with pytest.raises(ForeignProvider):
            provider.deallocate(buffer)
        assert buffer.into_raw() == memory.ctypes.data


class TestBorrowed:
    def test_it_aliases_without_owning(self):
        memory = np.full(64, 7, np.uint8)
        buffer = borrowed(memory)
        assert buffer.is_borrowed and len(buffer) == 64 and buffer.as_ptr() == memory.ctypes.data
        assert buffer.into_raw() == memory.ctypes.data
        memory[0] = 9  # still there, and writable for its owner
        assert memory[0] == 9 and (memory[1:] == 7).all()

    def test_an_owned_buffer_is_not_borrowed(self):
        memory = np.zeros(32, np.uint8)
        buffer = raw(memory, 1)
        assert not buffer.is_borrowed
        assert buffer.as_mut_ptr() == buffer.as_ptr() == memory.ctypes.data
        buffer.into_raw()

    def test_it_is_never_written(self, provider):
        memory = np.full(8, 7, np.uint8)
        buffer, source = borrowed(memory), provider.allocate(8, 8)
        with pytest.raises(ReadOnlyBuffer, match="borrowed"):
            buffer.as_mut_ptr()
        for copy in (provider.copy, provider.copy_async):
            with pytest.raises(ReadOnlyBuffer, match="borrowed"):
                copy(source, buffer, 8)
        assert not buffer.storage("read").read(8).flags.writeable
        assert (memory == 7).all()
        provider.deallocate(source)

    def test_deallocate_frees_nothing_and_consumes(self, provider):
        memory = np.full(8, 7, np.uint8)
        buffer = borrowed(memory)
        provider.deallocate(buffer)
        assert (memory == 7).all()
        with pytest.raises(DoubleFree):
            provider.deallocate(buffer)

    def test_it_keeps_the_map_alive(self, tmp_path):
        path = tmp_path / "weights.bin"
        path.write_bytes(bytes(range(256)))
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        array = np.frombuffer(mapped, np.uint8)
        buffer = borrowed(array)
        alive = weakref.ref(array)
        del array
        gc.collect()
        assert alive() is not None
        with pytest.raises(BufferError):
            mapped.close()  # the buffer still exports it
        assert content(buffer) == bytes(range(256))
        view = buffer.storage("read").read(256)
        del buffer
        gc.collect()
        assert view[255] == 255 and alive() is not None  # an array of it keeps it as well
        del view
        gc.collect()
        assert alive() is None
        mapped.close()

    def test_giving_it_away_lets_the_owner_go(self, provider):
        array = np.zeros(8, np.uint8)
        alive = weakref.ref(array)
        buffer = borrowed(array)
        del array
        provider.deallocate(buffer)
        gc.collect()
        assert alive() is None

    def test_dropping_it_is_no_leak(self, recwarn):
        before = leaks()
        buffer = borrowed(np.zeros(8, np.uint8))
        del buffer
        gc.collect()
        assert leaks() == before and not recwarn.list


class TestLeaks:
    def test_dropping_an_owned_buffer_leaks_counts_and_warns(self, provider):
        before = leaks()
        with pytest.warns(ResourceWarning, match="48 bytes on .* was dropped without deallocate"):
            buffer = filled(provider, b"x" * 48)
            address = buffer.as_ptr()
            del buffer
            gc.collect()
        after = leaks()
        assert (after.count - before.count, after.nbytes - before.nbytes) == (1, 48)
        assert ctypes.string_at(address, 48) == b"x" * 48  # leaked, not freed

    def test_a_buffer_given_away_is_no_leak(self, provider, recwarn):
        before = leaks()
        provider.deallocate(provider.allocate(8, 8))
        raw(np.zeros(8, np.uint8)).into_raw()
        gc.collect()
        assert leaks() == before
        assert not [w for w in recwarn if w.category is ResourceWarning]

    def test_a_refused_constructor_is_no_leak(self):
        before = leaks()
        with pytest.raises(NullPointer):
            DeviceBuffer.from_raw_parts(0, CPU, 8, 8)
        gc.collect()
        assert leaks() == before


class TestThreads:
    def test_a_buffer_moves_to_a_thread_and_back(self, provider):
        buffer = provider.allocate(64, 16)
        base = buffer.as_ptr()

        def work():
            assert (len(buffer), buffer.as_ptr()) == (64, base)
            provider.copy(borrowed(np.full(64, 3, np.uint8)), buffer, 64)
            return buffer

        with ThreadPoolExecutor(1) as pool:
            back = pool.submit(work).result()
        assert content(back) == bytes([3]) * 64
        provider.deallocate(back)

    def test_reads_are_concurrent(self, provider):
        buffer = filled(provider, bytes(range(256)) * 64)
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(lambda _: content(buffer), range(64))) == {bytes(range(256)) * 64}
        provider.deallocate(buffer)

    def test_threads_allocate_copy_and_free(self, provider):
        def work(n):
            source, target = filled(provider, bytes([n]) * 4096), provider.allocate(4096, 64)
            provider.copy(source, target, 4096)
            result = content(target)
            provider.deallocate(source)
            provider.deallocate(target)
            return result

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(work, range(40))) == [bytes([n]) * 4096 for n in range(40)]


class TestMemory:
    @pytest.mark.parametrize("size", [1 << 45, 1 << 62])
    def test_out_of_memory_tells_requested_and_available(self, provider, size):
        with pytest.raises(OutOfMemory) as caught:
            provider.allocate(size, 64)
        assert caught.value.requested == size
        assert 0 < caught.value.available < size

    def test_the_limit_counts_live_buffers(self):
        for name in PROVIDERS:
            provider = discovery.provider(name, options={f"{name}.memory_limit": "1000"})
            first = provider.allocate(600, 1)
            with pytest.raises(OutOfMemory, match="400 bytes are available"):
                provider.allocate(401, 1)
            provider.deallocate(first)
            provider.deallocate(provider.allocate(1000, 1))
            provider.shutdown()

    def test_a_view_outlives_the_free(self, provider):
        """Freed memory stays while an array of it lives: nothing can dangle."""
        buffer = filled(provider, b"y" * 100_000)
        view = buffer.storage("read").read(100_000)
        provider.deallocate(buffer)
        others = [filled(provider, b"n" * 100_000) for _ in range(4)]
        assert view.tobytes() == b"y" * 100_000
        list(map(provider.deallocate, others))

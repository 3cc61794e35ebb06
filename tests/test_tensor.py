"""Does `TensorView` describe memory exactly, refuse what does not fit, and cross library borders unharmed?"""

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest
from arrays import PROVIDERS, dtype_of, sample

from ep import discovery, dlpack
from ep.buffer import DeviceBuffer
from ep.device import DeviceId, DeviceType
from ep.errors import InvalidAlignment, InvalidInput, InvalidTensorView, ReadOnlyBuffer, UseAfterFree
from ep.tensor import NodeId, Shape, TensorLayout, TensorView

DTYPES = ("bool", "int8", "uint16", "int32", "int64", "float16", "bfloat16", "float32", "complex64")
WIDE = ("float64", "float8_e4m3fn", "float8_e5m2", "complex128")


@pytest.fixture(params=PROVIDERS)
def provider(request):
    made = discovery.provider(request.param)
    yield made
    made.shutdown()


def buffer_over(array):
    return DeviceBuffer.from_borrowed_parts(array.ctypes.data, DeviceId.cpu(), array.nbytes, 8, owner=array)


@pytest.fixture
def memory():
    """A buffer of 12 float32: 0, 1, …, 11."""
    return buffer_over(np.arange(12, dtype=np.float32))


class TestView:
    def test_row_major_is_the_default(self, memory):
        view = TensorView(memory, np.float32, (3, 4))
        assert (view.strides, view.size, view.nbytes, view.is_contiguous) == ((4, 1), 12, 48, True)
        assert view.layout == TensorLayout(alignment=8)
        np.testing.assert_array_equal(view.numpy(), np.arange(12).reshape(3, 4))

    @pytest.mark.parametrize(
        ("shape", "strides", "offset", "expected"),
        [
            ((4, 3), (1, 4), 0, np.arange(12).reshape(3, 4).T),
            ((2, 2), (8, 2), 1, [[1, 3], [9, 11]]),
            ((12,), (-1,), 11, np.arange(12)[::-1]),
            ((5, 2), (0, 1), 10, [[10, 11]] * 5),
            ((), (), 7, 7),
            ((0, 9), None, 12, np.empty((0, 9))),
        ],
    )
    def test_strides_and_offset_count_elements(self, memory, shape, strides, offset, expected):
        view = TensorView(memory, np.float32, shape, strides, offset)
        np.testing.assert_array_equal(view.numpy(), np.asarray(expected, np.float32), strict=True)

    def test_size_one_dimensions_do_not_matter_for_contiguity(self, memory):
        assert TensorView(memory, np.float32, (1, 12), (99, 1)).is_contiguous
        assert not TensorView(memory, np.float32, (2, 5), (6, 1)).is_contiguous
        assert TensorView(memory, np.float32, (2, 5), (6, 1)).layout.format == "custom"

    @pytest.mark.parametrize(
        ("dtype", "shape", "strides", "offset", "text"),
        [
            (np.float32, (13,), None, 0, "spans bytes 0 to 52 of a buffer of 48 bytes"),
            (np.float32, (12,), None, 1, "spans bytes 4 to 52"),
            (np.float32, (3, 4), (5, 1), 0, "spans bytes 0 to 56"),
            (np.float32, (2,), (-1,), 0, "spans bytes -4 to 4"),
            (np.float64, (7,), None, 0, "spans bytes 0 to 56"),
            (np.float32, (1 << 40, 1 << 40), None, 0, "overflows"),
            (np.float32, (1 << 62, 1), (0, 1), 0, "overflows"),
            (np.float32, (2,), (1 << 62,), 0, "overflows"),
            (np.float32, (0, 9), None, 13, "spans"),
            (np.float32, (-1,), None, 0, "negative"),
            (np.float32, (1,), None, -1, "negative"),
            (np.float32, (2, 2), (1,), 0, "2 dimensions .* have 1 strides"),
            (np.dtype(object), (1,), None, 0, "not numeric"),
            (np.dtype("U4"), (1,), None, 0, "not numeric"),
            (np.dtype("V4"), (1,), None, 0, "not numeric"),
            (np.dtype([("a", "f4")]), (1,), None, 0, "not numeric"),
            (np.dtype("f4").newbyteorder(), (1,), None, 0, "byte order"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, memory, dtype, shape, strides, offset, text):
        with pytest.raises(InvalidTensorView, match=text):
            TensorView(memory, dtype, shape, strides, offset)

    def test_misaligned_elements_are_refused(self):
        array = np.zeros(16, np.uint8)
        buffer = DeviceBuffer.from_borrowed_parts(array.ctypes.data + 1, DeviceId.cpu(), 15, 1, owner=array)
        with pytest.raises(InvalidTensorView, match="1 bytes past a multiple of 4"):
            TensorView(buffer, np.float32, (2,))
        TensorView(buffer, np.uint8, (15,))

    def test_use_after_free(self, provider):
        buffer = provider.allocate(48, 8)
        view = TensorView(buffer, np.float32, (12,))
        provider.deallocate(buffer)
        for use in (view.numpy, lambda: np.asarray(view), view.__dlpack__, lambda: view.device):
            with pytest.raises(UseAfterFree):
                use()
        with pytest.raises(UseAfterFree):
            TensorView(buffer, np.float32, (12,))

    def test_array_protocol(self, memory):
        view = TensorView(memory, np.float32, (12,))
        array = np.asarray(view)
        assert array.ctypes.data == memory.as_ptr() and not array.flags.writeable
        assert np.array(view, copy=True).flags.writeable
        assert np.asarray(view, dtype=np.int8).dtype == np.int8
        assert np.asarray(view, copy=False).ctypes.data == memory.as_ptr()


class TestBorrowingArrays:
    @pytest.mark.parametrize("name", [*DTYPES, *WIDE, "int4"])
    def test_any_dtype_without_copying(self, name):
        array = sample(name)
        view = TensorView.from_array(array)
        assert view.dtype == array.dtype and view.buffer.is_borrowed
        assert view.buffer.as_ptr() == array.ctypes.data
        assert view.numpy().tobytes() == array.tobytes()

    @pytest.mark.parametrize(
        "cut",
        [
            lambda a: a.T,
            lambda a: a[::2, ::-1],
            lambda a: a[::-1, 1:3],
            lambda a: a[1, 2],
            lambda a: a[:0],
            lambda a: np.broadcast_to(a[0], (5, 4)),
        ],
    )
    def test_any_strides_without_copying(self, cut):
        whole = sample("float32")
        array = np.asarray(cut(whole)) if np.ndim(cut(whole)) else whole[1:2, 2].reshape(())
        view = TensorView.from_array(array)
        assert not array.size or np.shares_memory(view.numpy(), whole)
        np.testing.assert_array_equal(view.numpy(), array, strict=True)

    def test_the_view_is_read_only_and_sees_the_owner_write(self):
        array = sample("float32")
        view = TensorView.from_array(array)
        seen = np.asarray(view)
        array[0, 0] = 99
        assert seen[0, 0] == 99 and not seen.flags.writeable
        with pytest.raises(ReadOnlyBuffer):
            view.buffer.as_mut_ptr()

    def test_the_view_keeps_the_array_alive(self):
        array = sample("float32")
        alive = weakref.ref(array)
        view = TensorView.from_array(array)
        del array
        gc.collect()
        seen = view.numpy()
        del view
        gc.collect()
        assert alive() is not None and seen[2, 3] == 11
        del seen
        gc.collect()
        assert alive() is None

    def test_what_cannot_be_viewed_is_refused(self):
        packed = np.zeros(4, np.dtype([("a", "u1"), ("b", "<f4")]))
        for array in (packed["b"], np.array(["x"]), np.array([object()]), np.zeros(2, ">f4")):
            with pytest.raises(InvalidTensorView):
                TensorView.from_array(array)


class TestDlpack:
    @pytest.mark.parametrize("name", [*DTYPES, *WIDE])
    def test_out_and_in_again(self, name):
        array = sample(name)[:, ::2]
        again = TensorView.from_dlpack(TensorView.from_array(array))
        assert again.dtype == array.dtype and again.device == DeviceId.cpu()
        assert again.numpy().tobytes() == array.tobytes()
        assert np.shares_memory(again.numpy(), array)

    def test_numpy_reads_a_borrowed_view_as_read_only(self):
        array = sample("float32")
        seen = np.from_dlpack(TensorView.from_array(array))
        assert np.shares_memory(seen, array) and not seen.flags.writeable
        np.testing.assert_array_equal(seen, array)

    def test_a_consumer_that_cannot_be_told_read_only_is_refused(self):
        view = TensorView.from_array(sample("float32"))
        with pytest.raises(ReadOnlyBuffer, match="older than 1.0"):
            view.__dlpack__()
        assert view.__dlpack__(copy=True) is not None

    def test_a_copy_is_writable_and_apart(self):
        array = sample("float32")
        seen = np.from_dlpack(TensorView.from_array(array), copy=True)
        seen[:] = 0
        assert array[2, 3] == 11

    def test_the_consumer_keeps_the_memory_alive(self, provider):
        buffer = provider.allocate(4000, 64)
        provider.copy(buffer_over(np.full(1000, 7, np.int32)), buffer, 4000)
        seen = np.from_dlpack(TensorView(buffer, np.int32, (1000,)))
        provider.deallocate(buffer)
        others = [provider.allocate(4000, 64) for _ in range(8)]
        assert (seen == 7).all()
        list(map(provider.deallocate, others))

    @pytest.mark.parametrize("name", DTYPES)
    def test_arrays_of_the_libraries_come_in_without_copying(self, provider, name):
        array = sample(name)
        theirs = provider.from_view(TensorView.from_array(array)).array
        if provider.name == "host" and name == "bfloat16":
            theirs = TensorView.from_array(theirs)  # NumPy itself does not export bfloat16
        view = TensorView.from_dlpack(theirs)
        assert view.dtype == array.dtype and view.numpy().tobytes() == array.tobytes()
        again = theirs if isinstance(theirs, TensorView) else provider.to_view(theirs)
        assert np.shares_memory(view.numpy(), again.numpy())

    def test_the_view_keeps_what_it_imported_alive(self):
        array = sample("float32")
        alive = weakref.ref(array)
        view = TensorView.from_dlpack(array)
        del array
        gc.collect()
        assert alive() is not None and view.numpy()[2, 3] == 11
        del view
        gc.collect()
        assert alive() is None

    def test_an_exporter_may_count_from_another_address(self):
        class Shifted:
            def __dlpack_device__(self):
                return 1, 0

            def __dlpack__(self, **asked):
                capsule = array.__dlpack__(**asked)
                fields = dlpack._tensor(capsule)
                fields.data, fields.byte_offset = fields.data - 64, 64
                return capsule

        array = sample("float32")
        np.testing.assert_array_equal(TensorView.from_dlpack(Shifted()).numpy(), array)

    def test_views_go_out_to_the_libraries(self):
        import jax
        import mlx.core as mx

        provider = discovery.provider("jax")
        for name in ("float32", "bfloat16", "int32"):
            array = sample(name, (16,))
            buffer = discovery.provider("host").allocate(array.nbytes, 64)
            provider.copy(buffer_over(array.view(np.uint8)), buffer, array.nbytes)
            view = TensorView(buffer, array.dtype, (16,))
            for theirs in (jax.dlpack.from_dlpack(view), mx.from_dlpack(view)):
                assert TensorView.from_dlpack(theirs).numpy().tobytes() == array.tobytes()
            buffer.into_raw()
        provider.shutdown()

    def test_devices_without_a_number_and_foreign_targets_are_refused(self):
        array = sample("float32")
        for kind, error in (("qnn", InvalidTensorView), ("cpu", BufferError)):
            view = TensorView.from_array(array, device=DeviceId.parse(kind))
            with pytest.raises(error):
                view.__dlpack__(max_version=(1, 0), dl_device=(2, 0))

    def test_the_fields_of_a_gpu_capsule(self):
        """The address is passed on untouched: no host code follows it."""
        view = TensorView.from_array(sample("bfloat16"), device=DeviceId(DeviceType.CUDA, 1))
        assert view.__dlpack_device__() == (2, 1)
        again = TensorView.from_dlpack(view)
        assert again.device == DeviceId(DeviceType.CUDA, 1) and again.dtype == ml_dtypes.bfloat16
        assert again.buffer.as_ptr() == view.buffer.as_ptr() and again.shape == (3, 4)


class TestProviderArrays:
    @pytest.mark.parametrize("name", DTYPES)
    @pytest.mark.parametrize("shape", [(3, 4), (), (0, 2)])
    def test_values_survive_the_way_in_and_out(self, provider, name, shape):
        array = sample(name, shape)
        theirs = provider.from_view(TensorView.from_array(array)).array
        view = provider.to_view(theirs)
        assert (view.dtype, view.shape, view.device) == (array.dtype, shape, provider.device_id)
        assert view.numpy().tobytes() == array.tobytes()
        assert view.buffer.is_borrowed and not view.numpy().flags.writeable
        assert provider.name == "host" or not provider.backend.to_numpy(theirs).flags.writeable

    def test_dtypes_that_the_device_does_not_hold_are_refused(self, provider):
        missing = {"host": [], "jax": ["longdouble"], "mlx": ["float64", "complex128", "float8_e5m2"]}
        for name in missing[provider.name]:
            with pytest.raises(InvalidInput, match=f"does not hold {dtype_of(name).name}"):
                provider.from_view(TensorView.from_array(sample(name)))

    def test_borrowing_says_whether_it_copied(self, provider):
        memory = np.zeros(4096 + 128, np.uint8)
        start = -memory.ctypes.data % 64
        for shift, text in ((0, None), (16, "not a multiple of 64")):
            array = memory[start + shift : start + shift + 4096].view(np.float32)
            theirs, reason = provider.from_view(TensorView.from_array(array))
            shared = np.shares_memory(provider.to_view(theirs).numpy(), memory)
            assert shared == (reason is None)
            if provider.name == "jax":
                assert reason is None if text is None else text in reason
            if provider.name == "host":
                assert reason is None

    def test_a_buffer_that_can_still_be_written_is_copied(self, provider):
        buffer = provider.allocate(4096, 64)
        provider.copy(buffer_over(np.full(4096, 1, np.uint8)), buffer, 4096)
        theirs, reason = provider.from_view(TensorView(buffer, np.uint8, (4096,)))
        provider.copy(buffer_over(np.full(4096, 2, np.uint8)), buffer, 4096)
        assert "written" in reason and (provider.to_view(theirs).numpy() == 1).all()
        provider.deallocate(buffer)

    def test_asarray_never_shares(self, provider):
        memory = np.zeros(4096 + 64, np.uint8)
        array = memory[-memory.ctypes.data % 64 :][:4096]
        with provider.backend.scope():
            theirs = provider.backend.enter(array)
        array[:] = 9
        assert (provider.to_view(theirs).numpy() == 0).all()

    def test_results_keep_their_width_in_user_code(self, provider):
        wide = provider.from_view(TensorView.from_array(sample("int64"))).array
        narrow = provider.from_view(TensorView.from_array(sample("int32"))).array
        released = provider.release([wide, narrow])
        assert released[1] is narrow
        assert isinstance(released[0], TensorView) == (provider.name == "jax")
        assert np.asarray(released[0]).dtype == np.int64
        host = np.arange(3)
        assert provider.release(host) is host


class TestShape:
    def test_dimensions_are_sizes_names_or_unknown(self):
        shape = Shape((1, "batch", None, np.int64(4)))
        assert shape == (1, "batch", None, 4) and str(shape) == "[1, batch, ?, 4]"
        assert not shape.is_static and Shape((2, 3)).is_static and Shape((2, 3)).size == 6
        assert shape.bind({"batch": 2}) == (1, 2, None, 4)
        assert Shape(()).size == 1 and Shape((0, 5)).size == 0 and shape.size is None

    def test_a_name_has_one_value_per_run(self):
        sizes = Shape(("n", "m", None)).match((2, 3, 9))
        assert sizes == {"n": 2, "m": 3}
        assert Shape(("m", 5)).match((3, 5), sizes) == sizes
        with pytest.raises(InvalidInput, match=r"0 is 4 instead of 3 \('m' has that value elsewhere\)"):
            Shape(("m",)).match((4,), sizes)
        with pytest.raises(InvalidInput, match="'n'"):
            Shape(("n", "n")).match((2, 3))

    @pytest.mark.parametrize(("shape", "text"), [((2,), "1 dimensions instead of 2"), ((2, 4), "4 instead")])
    def test_mismatches_are_told(self, shape, text):
        with pytest.raises(InvalidInput, match=text):
            Shape(("n", 3)).match(shape)

    @pytest.mark.parametrize("dim", [-1, 1.5, object()])
    def test_other_dimensions_are_refused(self, dim):
        with pytest.raises(InvalidInput):
            Shape((dim,))


def test_layouts_and_node_ids_are_values():
    assert TensorLayout().is_contiguous and not TensorLayout(format="channels_last").is_contiguous
    assert not TensorLayout((1, 4)).is_contiguous
    with pytest.raises(InvalidAlignment):
        TensorLayout(alignment=3)
    assert sorted({NodeId(2), NodeId(1), NodeId(2)}) == [NodeId(1), NodeId(2)]

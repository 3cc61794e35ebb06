"""Does compiled code wait safely for the next session: found again, bounded, shared, private, and never wrong?"""

import ast
import errno
import inspect
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from conftest import parse

import ep
from ep import context_cache
from ep.container import Code, Container, pack
from ep.context_cache import Cache, ContextNotice, default_directory, open_cache
from ep.errors import InvalidInput
from ep.identity import differences
from ep.library import Library, Made

MODEL = """
g (float[n, 3] x) => (float[n, 3] y, int64[1] rows) <float[1] two = {2.0}> {
    z = Mul(x, two)
    y = Tanh(z)
    rows = Shape<end = 1>(x)
}
"""
X = np.arange(6, dtype=np.float32).reshape(2, 3)
POSIX = pytest.mark.skipif(not hasattr(os, "getuid"), reason="permissions are those of POSIX")


def key(number):
    return f"{number:064x}"


def entry(number, size=10):
    return Container("ep.jax", "1", "f", codes=(Code(key(number), (), b"c" * size),))


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


@pytest.fixture(autouse=True)
def store_everything(monkeypatch):
    monkeypatch.setattr("ep.library.WORTH", 0.0)
    monkeypatch.setattr("ep.library.GAIN", 0.0)


def session(device, folder, text=MODEL, **options):
    return ep.load(parse(text), device, options={"context.cache": str(folder), **options})


# What is stored is found.


def test_the_next_session_compiles_nothing(accelerator, tmp_path):
    first = session(accelerator, tmp_path)
    expected = first.run(None, {"x": X})
    assert (first.counters.misses, first.counters.loaded) == (1, 0)
    second = session(accelerator, tmp_path)
    found = second.run(None, {"x": X})
    assert (second.counters.misses, second.counters.loaded) == (0, 1)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)
    second.run(None, {"x": X[:1]})
    assert (second.counters.misses, second.counters.loaded) == (1, 1), "another shape is compiled"


@pytest.mark.parametrize(
    "change",
    [("Tanh", "Sigmoid"), ("{2.0}", "{3.0}"), ("Mul(x, two)", "Mul(two, x)"), ("Mul", "Add"), ("n, 3] y", "n, 3] y2")],
    ids=str,
)
def test_only_the_same_computation_is_found(device, tmp_path, change):
    """What is renamed only is the same; swapped inputs are not."""
    other = MODEL.replace("y = Tanh", "y2 = Tanh").replace(*change) if "y2" in change[1] else MODEL.replace(*change)
    session(device, tmp_path).run(None, {"x": X})
    changed = session(device, tmp_path, other)
    got = changed.run(None, {"x": X})
    np.testing.assert_array_equal(got[0], session(device, "off", other).run(None, {"x": X})[0])
    if device != "host":
        assert changed.counters.loaded == ("y2" in change[1])


def test_a_group_that_cannot_be_traced_is_cut_at_once(accelerator, tmp_path):
    text = """
    g (float[n] x) => (float[m] y) {
        total = ReduceSum<keepdims = 0>(x)
        some = Greater(total, total)
        y = If(some) <
            then_branch = a () => (float[m] p) { p = Neg(x) },
            else_branch = b () => (float[k] q) { q = Concat<axis = 0>(x, x) }
        >
    }
    """
    x = np.arange(3, dtype=np.float32)
    first, second = session(accelerator, tmp_path, text), session(accelerator, tmp_path, text)
    expected = first.run(None, {"x": x})
    np.testing.assert_array_equal(expected[0], np.concatenate([x, x]))
    np.testing.assert_array_equal(second.run(None, {"x": x})[0], expected[0])
    assert second.counters.misses == 0 and second._library.cuts == first._library.cuts


def test_operators_of_other_packages_are_not_stored(accelerator, tmp_path):
    """Their source may change without our knowing."""
    if ep.OPS.find("test.cache", "Twice", 1) is None:
        ep.op("Twice", domain="test.cache")(lambda xp, x: x + x)
    body = "g (float[n] x) => (float[n] y) { y = test.cache.Twice(x) }"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["test.cache": 1]> {body}')
    for _ in range(2):
        loaded = ep.load(proto, accelerator, options={"context.cache": str(tmp_path)})
        loaded.run(None, {"x": X[0]})
        assert (loaded.counters.misses, loaded.counters.loaded) == (1, 0)
        assert "is not known here" in str(loaded._library.refused)
    assert list(Cache(tmp_path)) == []


def test_another_fingerprint_finds_nothing(accelerator, tmp_path, monkeypatch):
    session(accelerator, tmp_path).run(None, {"x": X})
    monkeypatch.setattr("ep.identity.code_identity", lambda: "0.0-other")
    other = session(accelerator, tmp_path)
    other.run(None, {"x": X})
    assert (other.counters.misses, other.counters.loaded) == (1, 0)


NOISE = "g (float[n, 3] x) => (float[n, 3] y) { r = RandomNormalLike<seed = 1.0>(x)\n y = Add(r, x) }"


@pytest.mark.parametrize(
    ("setting", "value"),
    [("jax_threefry_partitionable", False), ("jax_default_prng_impl", "rbg"), ("jax_optimization_level", "O1")],
)
def test_code_is_not_found_under_other_settings_of_jax(tmp_path, setting, value):
    """A seed gives other numbers under the first two: the program that sets them gets those, stored code or not."""
    jax = pytest.importorskip("jax")
    plain = session("jax", tmp_path, NOISE).run(None, {"x": X})
    before = getattr(jax.config, setting)
    jax.config.update(setting, value)
    try:
        other = session("jax", tmp_path, NOISE)
        found = other.run(None, {"x": X})
        assert (other.counters.misses, other.counters.loaded) == (1, 0)
        np.testing.assert_array_equal(found[0], session("jax", "off", NOISE).run(None, {"x": X})[0])
        assert np.array_equal(found[0], plain[0]) == (setting == "jax_optimization_level")
        again = session("jax", tmp_path, NOISE)
        again.run(None, {"x": X})
        assert (again.counters.misses, again.counters.loaded) == (0, 1), "the same settings find it"
    finally:
        jax.config.update(setting, before)


def test_a_program_that_sets_nothing_has_the_default_settings():
    pytest.importorskip("jax")
    code = "from ep.backends.jax.settings import changed; print(changed())"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "default"


def test_every_setting_that_jax_compiles_anew_for_has_been_looked_at():
    """Those named here do not reach a session's code, with the reason."""
    pytest.importorskip("jax")
    config = pytest.importorskip("jax._src.config")
    from ep.backends.jax.settings import REACHING

    set_in_scope = {"jax_enable_x64", "jax_default_device", "jax_numpy_rank_promotion", "jax_disable_jit"}
    may_only_refuse = {"jax_numpy_dtype_promotion", "jax_debug_key_reuse", "jax_no_execution"}
    may_only_refuse |= {"jax_mutable_array_checks"}
    of_many_devices = {"jax_remove_size_one_mesh_axis_from_type", "check_vma", "jax_auto_pcast"}
    only_names = {"jax_hlo_source_file_canonicalization_regex"}
    calls = [n for n in ast.walk(ast.parse(inspect.getsource(config))) if isinstance(n, ast.Call)]
    known = {
        ast.literal_eval(kinds["name"])
        for call in calls
        for kinds in [{k.arg: k.value for k in call.keywords}]
        if "name" in kinds and {"include_in_jit_key", "include_in_trace_context"} & set(kinds)
        if isinstance(kinds["name"], ast.Constant)
    }
    assert len(known) > 20
    assert known - REACHING.keys() - set_in_scope - may_only_refuse - of_many_devices - only_names == set()


def test_differences_are_named():
    assert differences("a 1 / b 2 / c x y", "a 1 / b 3 / d") == [
        "b 2 instead of 3",
        "c x y instead of none",
        "d not named instead of ",
    ]


# The directory.


def test_nothing_is_written_before_something_is_compiled(tmp_path):
    folder = tmp_path / "deep" / "cache"
    loaded = session("host", folder)
    loaded.run(None, {"x": X})
    assert not folder.exists()


def test_auto_is_the_platforms_directory_or_the_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(context_cache.VARIABLE)
    assert open_cache("auto").directory == default_directory()
    if sys.platform == "linux":
        assert default_directory() == tmp_path / "ep-runtime"
    monkeypatch.setenv(context_cache.VARIABLE, str(tmp_path / "own"))
    assert open_cache("auto").directory == tmp_path / "own"
    monkeypatch.setenv(context_cache.VARIABLE, "off")
    assert open_cache("auto") is None and open_cache("off") is None
    assert open_cache(str(tmp_path)).directory == tmp_path


@POSIX
def test_a_directory_that_others_may_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidInput, match="is not safe.*\n.*others may write"):
        session("jax", tmp_path)
    tmp_path.chmod(0o755)
    Cache(tmp_path)


@POSIX
def test_what_is_created_is_private_whatever_the_umask(tmp_path):
    cache, before = Cache(tmp_path / "new" / "cache"), os.umask(0o002)
    try:
        cache.put(key(1), entry(1))
    finally:
        os.umask(before)
    path = cache.path(key(1))
    for each in (path, path.parent, path.parent.parent, cache.directory):
        assert each.stat().st_mode & 0o077 == 0
    assert Cache(cache.directory).get(key(1)) == entry(1).codes[0]


@POSIX
def test_entries_that_others_may_write_are_not_read(cache):
    cache.put(key(1), entry(1))
    cache.path(key(1)).chmod(0o666)
    assert cache.get(key(1)) is None


def test_a_directory_that_is_only_read_serves(cache, monkeypatch):
    """Such as one that a container image holds; nothing tells there what was used."""
    cache.put(key(1), entry(1))
    os.utime(cache.path(key(1)), (1, 1))

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert cache.get(key(1)) == entry(1).codes[0]


@POSIX
def test_a_default_directory_that_cannot_serve_is_told(tmp_path, monkeypatch):
    """Nobody asked for a cache, so that loading goes on without."""
    monkeypatch.delenv(context_cache.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(context_cache.sys, "platform", "linux")
    (tmp_path / "ep-runtime").mkdir()
    (tmp_path / "ep-runtime").chmod(0o777)
    with pytest.warns(ContextNotice, match="is not safe"):
        assert open_cache("auto") is None
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_directory() == tmp_path / ".cache" / "ep-runtime"

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.warns(ContextNotice, match="compiled code is not kept"):
        assert open_cache("auto") is None


def test_a_directory_that_cannot_be_written_is_told_once(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "below")
    with pytest.warns(ContextNotice, match="cannot be kept in .*Each start compiles again"):
        cache.put(key(1), entry(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put(key(1), entry(1))
        assert cache.get(key(1)) is None and list(cache) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda blob: blob[:-1],
        lambda blob: b"",
        lambda blob: blob[:200] + bytes([blob[200] ^ 1]) + blob[201:],
        lambda blob: pack(entry(2)),
    ],
)
def test_a_damaged_entry_is_discarded_with_a_notice(cache, damage):
    cache.put(key(1), entry(1))
    cache.path(key(1)).write_bytes(damage(pack(entry(1))))
    with pytest.warns(ContextNotice, match="discarded the damaged entry"):
        assert cache.get(key(1)) is None
    assert list(cache) == []


def test_a_damaged_entry_is_compiled_again(accelerator, tmp_path):
    expected = session(accelerator, tmp_path).run(None, {"x": X})
    for stored in Cache(tmp_path):
        stored.path.write_bytes(stored.path.read_bytes()[:-8])
    again = session(accelerator, tmp_path)
    with pytest.warns(ContextNotice, match="discarded"):
        got = again.run(None, {"x": X})
    np.testing.assert_array_equal(got[0], expected[0])
    assert again.counters.misses == 1


# Bounds.


def test_what_was_not_used_for_longest_goes(tmp_path):
    size = len(pack(entry(0, 1000)))
    cache = Cache(tmp_path, limit=3 * size)
    for number in range(3):
        cache.put(key(number), entry(number, 1000))
        os.utime(cache.path(key(number)), (number + 1, number + 1))
    assert cache.get(key(0)) is not None  # and so it counts as used now
    cache.put(key(3), entry(3, 1000))
    assert {e.key for e in cache} == {key(0), key(2), key(3)}
    assert sum(e.size for e in cache) <= cache.limit


def test_left_over_temporary_files_go(cache):
    cache.put(key(1), entry(1))
    folder = cache.path(key(1)).parent
    old, new = folder / ".old.tmp", folder / ".new.tmp"
    old.write_bytes(b"")
    new.write_bytes(b"")
    os.utime(old, (1, 1))
    cache.sweep()
    assert not old.exists() and new.exists() and len(list(cache)) == 1


def test_entries_are_removed(cache):
    for number in range(4):
        cache.put(key(number << 248), entry(number << 248))
    cache.remove(list(cache)[1:])
    assert len(list(cache)) == 1
    cache.remove([*cache, *cache])  # another process may be faster
    assert list(cache) == []


# Several processes.

WORK = """
import sys, random, warnings
warnings.simplefilter("error")
from pathlib import Path
from ep.container import Code, Container
from ep.context_cache import Cache
cache = Cache(Path(sys.argv[1]), limit=30_000)
rng = random.Random(int(sys.argv[2]))
for _ in range(300):
    number = rng.randrange(40)
    key = f"{number:064x}"
    found = cache.get(key)
    assert found is None or (found.key == key and bytes(found.code) == bytes([number]) * 2000)
    if found is None:
        cache.put(key, Container("s", "v", "f", codes=(Code(key, (), bytes([number]) * 2000),)))
    if rng.random() < 0.05:
        cache.sweep()
"""


def test_processes_share_a_directory(tmp_path):
    """Readers see whole entries or none while others write, evict and read them."""
    command = [sys.executable, "-c", WORK, str(tmp_path)]
    workers = [subprocess.Popen([*command, str(seed)], stderr=subprocess.PIPE, text=True) for seed in range(3)]
    for worker in workers:
        assert worker.communicate(timeout=60)[1] == "" and worker.returncode == 0
    assert sum(e.size for e in Cache(tmp_path)) <= 30_000 + 3 * 2500


def test_a_library_without_a_cache_still_compiles():
    assert Library().cache is None


def test_what_xla_cannot_serialize_is_not_stored():
    """XLA refuses some sorts, "`LessThan` is not serializable", when it is asked for the bytes."""
    jax = pytest.importorskip("jax")
    from ep.backend import NotStorable
    from ep.backends.jax import executable

    class Client:
        def serialize_executable(self, compiled):
            raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: `LessThan` is not serializable.")

    function, code = executable.ahead(
        SimpleNamespace(platform="cpu", client=Client()), lambda x: (x + 1,), [((2,), np.dtype("f4"))]
    )
    np.testing.assert_array_equal(function(np.zeros(2, np.float32))[0], [1, 1])
    with pytest.raises(NotStorable, match="LessThan"):
        code()


def test_functions_that_no_group_keeps_are_not_kept_for_saving(monkeypatch):
    monkeypatch.setattr("ep.library.MOST_LIVE", 2)
    library = Library()
    for number in range(5):
        library._remember(key(number), Made("jax", (), lambda: b"", live=number != 1))
    assert list(library.made) == [key(1), key(3), key(4)], "what is stored takes little, and stays"

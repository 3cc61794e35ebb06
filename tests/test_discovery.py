"""Are providers found, made and chosen rightly, and do failures say what to install?"""

import subprocess
import sys

import pytest
from arrays import PROVIDERS, Minimal, node

from ep import discovery
from ep.errors import BackendUnavailable, EpLoadFailed, InvalidInput, NoEpForOp, OutOfMemory, UnknownOption
from ep.kernel import Cost, KernelMatch
from ep.provider import EpId


class Declining(Minimal):
    name = "declining"


class Accepting(Minimal):
    name = "accepting"

    def supports_op(self, op, shapes=(), layouts=(), *, dtypes=None):
        return KernelMatch(Cost(compute_us=1))


class TestRegistry:
    def test_numbers_names_and_order(self):
        registry = discovery.EpRegistry()
        low, high, same = Minimal(), Accepting(), Declining()
        assert [registry.register(low), registry.register(high, priority=5), registry.register(same)] == [
            EpId(0),
            EpId(1),
            EpId(2),
        ]
        assert [registry[ep] for ep in registry] == [high, low, same] and len(registry) == 3
        assert registry.find("declining") == EpId(2) and registry.find("nobody") is None

    def test_candidates_are_those_that_accept(self):
        registry = discovery.EpRegistry()
        for provider in (Declining(), Accepting(), discovery.provider("host")):
            registry.register(provider)
        found = registry.candidates(node("Relu", ["x"]))
        assert [ep for ep, _ in found] == [EpId(1), EpId(2)] and all(match.supported for _, match in found)

    def test_no_candidate_reports_every_reason(self):
        registry = discovery.EpRegistry()
        registry.register(Declining())
        registry.register(discovery.provider("host"))
        with pytest.raises(NoEpForOp) as caught:
            registry.candidates(node("NoSuchOp", ["x"]))
        assert caught.value.reasons == {
            "declining": "it runs nothing",
            "host": "ai.onnx::NoSuchOp has no lowering in ep.ops",
        }

    def test_unknown_numbers_and_second_names_are_refused(self):
        registry = discovery.EpRegistry()
        registry.register(Minimal())
        for ep in (EpId(1), EpId(-1)):
            with pytest.raises(InvalidInput, match="no provider number"):
                registry[ep]
        with pytest.raises(InvalidInput, match="registered already"):
            registry.register(Minimal())


class Entry:
    """An installed entry point."""

    def __init__(self, name, load, dist=None):
        self.name, self.value, self.load, self.dist = name, f"{name}:provider", load, dist


class Dist:
    name = "ep-runtime"
    metadata = type("Metadata", (), {"get_all": staticmethod(lambda key: ["tpu"])})


def raising(error):
    def load():
        raise error

    return load


class TestDiscovery:
    @pytest.fixture
    def installed(self, monkeypatch):
        """A way to pretend that providers are installed."""
        entries = {}
        monkeypatch.setattr(discovery, "entry_points", lambda: entries)
        return lambda entry: entries.update({entry.name: entry})

    def test_the_own_providers_are_found(self):
        assert set(PROVIDERS) <= set(discovery.entry_points())
        assert next(iter(discovery.entry_points())) == "host"

    def test_unknown_providers_and_namespaces(self):
        with pytest.raises(InvalidInput, match="Did you mean 'jax'"):
            discovery.provider("jaxx")
        with pytest.raises(UnknownOption, match="Did you mean 'jax.memory_limit'"):
            discovery.provider("host", options={"jaxx.memory_limit": "1"})

    def test_the_host_answers_to_the_name_of_its_device(self):
        host = discovery.provider("cpu", options={"cpu.memory_limit": "100"})
        assert host.name == "host" and str(host.device_id) == "cpu:0"
        with pytest.raises(OutOfMemory):
            host.allocate(101, 64)
        with pytest.raises(UnknownOption, match="host.memory_limit"):
            discovery.provider("cpu", options={"cpu.memory_limits": "100"})

    @pytest.mark.parametrize("name", PROVIDERS)
    def test_unknown_devices(self, name):
        with pytest.raises(BackendUnavailable, match="no device 'cuda:7'"):
            discovery.provider(name, "cuda:7")
        assert discovery.provider(name, "cpu").name == name

    def test_a_library_that_is_not_installed(self, installed):
        missing = ModuleNotFoundError("No module named 'tpulib'", name="tpulib.core")
        installed(Entry("tpu", raising(missing), Dist))
        installed(Entry("alien", raising(missing)))
        with pytest.raises(BackendUnavailable) as caught:
            discovery.provider("tpu")
        assert "no module 'tpulib'" in caught.value.why
        assert caught.value.fix == 'pip install "ep-runtime[tpu]"'
        with pytest.raises(BackendUnavailable, match='pip install "tpulib"'):
            discovery.provider("alien")

    @pytest.mark.parametrize("error", [OSError("libcuda"), RuntimeError("driver"), ImportError("bad ABI")])
    def test_a_library_that_does_not_work(self, installed, error):
        installed(Entry("tpu", raising(error)))
        with pytest.raises(EpLoadFailed, match=f"{type(error).__name__}: {error}") as caught:
            discovery.provider("tpu")
        assert caught.value.__cause__ is error

    def test_what_is_no_provider_is_refused(self, installed):
        installed(Entry("tpu", lambda: lambda: 42))
        with pytest.raises(EpLoadFailed, match="returned a int"):
            discovery.provider("tpu")

    def test_third_parties_are_made_and_initialised(self, installed):
        installed(Entry("minimal", lambda: Minimal))
        assert isinstance(discovery.provider("minimal", options={"minimal.depth": "1"}), Minimal)
        with pytest.raises(UnknownOption):
            discovery.provider("minimal", options={"minimal.width": "1"})

    def test_the_survey_tells_what_works_and_why_the_rest_does_not(self, installed):
        installed(Entry("minimal", lambda: Minimal))
        installed(Entry("tpu", raising(ModuleNotFoundError("x", name="tpulib")), Dist))
        good, bad = discovery.survey()
        assert (good.name, good.device, good.works) == ("minimal", "custom(1):0", True)
        assert not bad.works and "pip install" in bad.problem.fix

    def test_the_survey_of_this_machine(self):
        reports = {report.name: report for report in discovery.survey()}
        for name in PROVIDERS:
            assert reports[name].works and reports[name].version and reports[name].device
        assert reports["mlx"].device == "mlx:0"


class TestImports:
    """In processes of their own, where nothing is imported yet."""

    @staticmethod
    def output(code):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert not done.stderr
        return done.stdout.strip()

    def test_a_backend_is_imported_only_when_asked_for(self):
        loaded = "print(sorted({'jax', 'mlx.core', 'onnx_ir'} & set(sys.modules)))"
        assert self.output(f"import sys, ep.discovery as d; d.provider('host'); {loaded}") == "[]"
        assert self.output(f"import sys, ep.discovery as d; d.provider('jax'); {loaded}") == "['jax']"

    @pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MLX has a fast BLAS of its own")
    def test_openblas_is_there_before_mlx_or_the_user_is_told(self):
        code = "import ctypes, ep.discovery as d; notes = d.provider('mlx').backend.notes; "
        code += "print(hasattr(ctypes.CDLL(None), 'openblas_get_config'), 'slow' in str(notes))"
        assert self.output(code) in ("True False", "False True")

    @pytest.mark.skipif(sys.platform != "linux", reason="elsewhere MLX has a fast BLAS of its own")
    def test_mlx_imported_too_early_is_told(self):
        code = "import mlx.core, ep.discovery as d; print(*d.provider('mlx').backend.notes)"
        assert "mlx.core was imported before ep" in self.output(code)

"""Are devices named, parsed and compared as users write them?"""

import pytest

from ep.device import DeviceId, DeviceType
from ep.errors import InvalidInput

NAMES = ("cpu", "cuda", "rocm", "coreml", "mlx", "webgpu", "qnn", "openvino")


@pytest.mark.parametrize("name", [*NAMES, "custom(0)", "custom(17)"])
def test_names_read_back(name):
    kind = DeviceType.parse(name)
    assert str(kind) == name and DeviceType.parse(str(kind)) == kind


def test_constants_are_the_table():
    assert [str(getattr(DeviceType, name.upper())) for name in NAMES] == list(NAMES)
    assert DeviceType.custom(3) == DeviceType.parse("custom(3)") != DeviceType.custom(4)


@pytest.mark.parametrize("text", ["metal", "Metal", " MLX ", "mlx"])
def test_metal_reads_as_mlx(text):
    assert DeviceType.parse(text) == DeviceType.MLX


def test_only_cpu_and_mlx_are_host_accessible():
    assert [name for name in NAMES if DeviceType(name).is_host_accessible] == ["cpu", "mlx"]
    assert not DeviceType.custom(1).is_host_accessible


@pytest.mark.parametrize("text", ["", "gpu0", "custom", "custom(-1)", "custom(01)", "custom(x)"])
def test_unknown_kinds_are_refused(text):
    with pytest.raises(InvalidInput, match="unknown device type"):
        DeviceType.parse(text)


def test_close_names_are_suggested():
    with pytest.raises(InvalidInput, match="Did you mean 'cuda'"):
        DeviceType.parse("cudaa")


def test_the_canonical_name_is_required_by_the_constructor():
    with pytest.raises(InvalidInput):
        DeviceType("metal")


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cuda:1", DeviceId(DeviceType.CUDA, 1)),
        ("cuda", DeviceId(DeviceType.CUDA, 0)),
        ("Metal:0", DeviceId(DeviceType.MLX, 0)),
        ("custom(2):3", DeviceId(DeviceType.custom(2), 3)),
        ("cpu", DeviceId.cpu()),
    ],
)
def test_device_ids_parse(text, device):
    assert DeviceId.parse(text) == device
    assert DeviceId.parse(str(device)) == device


@pytest.mark.parametrize("text", ["cuda:", "cuda:x", "cuda:-1", "cuda:1:2", ":0"])
def test_malformed_device_ids_are_refused(text):
    with pytest.raises(InvalidInput):
        DeviceId.parse(text)


def test_devices_are_values():
    assert len({DeviceId.parse("cuda:0"), DeviceId.parse("cuda"), DeviceId.parse("cuda:1")}) == 2
    assert DeviceId.cpu().is_host_accessible and not DeviceId.parse("cuda").is_host_accessible
    with pytest.raises(InvalidInput):
        DeviceId(DeviceType.CPU, -1)

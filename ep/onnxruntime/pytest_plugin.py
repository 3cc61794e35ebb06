"""How do tests that import onnxruntime run on this runtime? `pytest -p ep.onnxruntime.pytest_plugin`."""

from ep.onnxruntime_alias import install

install()  # plugins named by -p are imported before any conftest.py or test


def pytest_report_header() -> str:
    """One line that says what onnxruntime is here."""
    from ep.onnxruntime import get_build_info

    return f"onnxruntime: {get_build_info()}"

"""Which package is this? The facts that onnxruntime's own build writes down."""

from ep.onnxruntime.environment import API_VERSION as __version__  # noqa: F401

package_name = "onnxruntime"

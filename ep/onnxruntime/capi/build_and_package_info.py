"""Which package is this? The facts that onnxruntime's own build writes down."""

from ep.onnxruntime.environment import API_VERSION

package_name = "onnxruntime"
__version__ = API_VERSION

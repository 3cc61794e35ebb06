"""Which of onnxruntime's tools for transformers are here? The one that running models needs: `io_binding_helper`."""

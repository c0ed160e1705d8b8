"""ONNX export: the graph of an encoder, its proof in onnxruntime, and 8-bit quantization."""

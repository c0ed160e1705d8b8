"""ONNX: the graph of an encoder, its proof in onnxruntime, and the same in 8 bits."""

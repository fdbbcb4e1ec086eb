"""ONNX to ONNX: find the Mixture-of-Experts blocks of a model, prove them, and fuse each into one HinaMoE node."""

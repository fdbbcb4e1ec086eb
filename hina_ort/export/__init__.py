"""A Hugging Face checkpoint to an ONNX model with HinaMoE nodes, in one step; needs torch and transformers 5."""

"""`hina-ort generate`: text from a language model, on ONNX Runtime and tokenizers alone."""

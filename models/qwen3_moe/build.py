"""A small random Qwen3-MoE with a byte-level tokenizer, and its export by optimum-onnx. Needs no network.

`python -m models.qwen3_moe.build FOLDER` writes FOLDER/checkpoint and FOLDER/onnx.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

SEED = 20250101
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CONFIG: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    # Wider than the library's 0.02, so that experts and next tokens are chosen by clear margins.
    "initializer_range": 0.08,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def build(folder: str | Path, *, dtype: str = "float32", **overrides: Any) -> Path:
    """Write config, random weights (fixed seed) and tokenizer into `folder`; return it.

    `overrides` replace entries of `CONFIG` (names of Hugging Face's Qwen3MoeConfig); `dtype` is a torch dtype name.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = Path(folder)
    torch.manual_seed(SEED)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**CONFIG, **overrides}))
    model.to(getattr(torch, dtype)).eval().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def export(checkpoint: str | Path, folder: str | Path, *, dtype: str | None = None) -> Path:
    """Export `checkpoint` with optimum-onnx (task text-generation-with-past) into `folder`; return the model file.

    `dtype` is optimum's: None (as the checkpoint), "fp32" or "fp16".
    """
    from optimum.exporters.onnx import main_export

    main_export(str(checkpoint), str(folder), task="text-generation-with-past", dtype=dtype, do_validation=False)
    return Path(folder) / "model.onnx"


def byte_tokenizer() -> Any:
    """A byte-level tokenizer without merges: token id = special tokens, then the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_input_names=["input_ids", "attention_mask"],  # as Qwen's own: the model takes no token_type_ids
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )


def main() -> None:
    """Build and export with the default sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    export(build(folder / "checkpoint"), folder / "onnx")


if __name__ == "__main__":
    main()

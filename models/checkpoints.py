"""Tiny random checkpoints as they lie on the Hugging Face hub: names, types, layout and shards of the real ones.

transformers' `save_pretrained` writes them, so that names and layout of the experts are those that the loading code of
an architecture expects; what it writes otherwise than the publishers is changed afterwards: gpt-oss has MXFP4 experts
and Qwen3.5 stacked ones, biases of routers stay in float32, and heads for multi-token prediction lie beside.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models import language_models
from models.language_models import LAYERS

_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_CHUNKED = {
    "attn_temperature_tuning": True,
    "floor_scale": 16,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 32,
    },
    "intermediate_size_mlp": 48,
    "interleave_moe_layer_step": 1,
    "attention_chunk_size": 32,
    "no_rope_layers": [1, 0],  # the first has rotary positions and chunks of tokens, the second neither
}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "short_mscale": 1.1,
    "long_mscale": 1.3,
}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

CHANGES: dict[str, Mapping[str, Any]] = {
    "qwen3_moe": {},
    "qwen2_moe": {},
    "mixtral": {},
    "olmoe": {},
    "deepseek_v2": {"rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    "deepseek_v3": {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "gpt_oss": {
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {**_YARN, "truncate": False},
    },
    "glm4_moe": {"use_qk_norm": True, "rope_parameters": _PARTIAL},
    "granitemoe": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.7,
    },
    "phimoe": {"rope_parameters": _LONG},
    "ernie4_5_moe": {},
    "minimax_m2": {"rope_parameters": _PARTIAL},
    "hunyuan_v1_moe": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 1000.0}
    },
    "dots1": {},
    "gpt_oss_bfloat16": {},
    "llama4": {},
    "llama4_text": _CHUNKED,
    "qwen3_next": _DELTA_NET,
    "qwen3_5_moe": {},
    "qwen3_5_moe_text": {},
    "qwen3_moe_tied": {"mlp_only_layers": [0], "num_hidden_layers": LAYERS + 1, "tie_word_embeddings": True},
}
"""The checkpoints, and what their configurations have beside the settings of `language_models`.

They are called after their architectures. gpt_oss_bfloat16 has experts that are not quantised, llama4 a vision model
beside it, as qwen3_5_moe has, and qwen3_moe_tied a dense layer and no head of its own.
"""

_MTP = {
    "deepseek_v3": f"model.layers.{LAYERS + 1}.eh_proj.weight",
    "glm4_moe": f"model.layers.{LAYERS + 1}.eh_proj.weight",
    "qwen3_next": "mtp.fc.weight",
    "qwen3_5_moe": "mtp.fc.weight",
}
"""A tensor of the head for multi-token prediction, which transformers does not read."""


def build(architecture: str, folder: Path, *, shards: int = 2, dtype: str = "bfloat16", seed: int = 0) -> Path:
    """Write a checkpoint of `architecture` with a byte-level tokenizer into `folder`; return it.

    `dtype` is the torch type of its weights; `shards` > 1 makes about as many files and their index.
    """
    import torch

    from models.qwen3_moe.build import byte_tokenizer

    model = _model(architecture, seed)
    _spread(model, seed + 1)
    model.to(getattr(torch, dtype))
    _correction_biases(model, seed + 2)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    model.save_pretrained(
        folder,
        max_shard_size=int(1.15 * size) // shards if shards > 1 else 2 * size,
        save_original_format=architecture != "qwen3_5_moe",
    )
    byte_tokenizer().save_pretrained(folder)
    if architecture == "gpt_oss":
        _to_mxfp4(folder, seed + 3)
    if architecture in _MTP:
        head = {_MTP[architecture]: torch.ones(64, 128, dtype=getattr(torch, dtype))}
        _rewrite(max(folder.glob("*.safetensors")), (), head)
    return folder


def reference(folder: Path) -> Any:
    """The checkpoint in `folder` as a torch model of float32 in evaluation mode, loaded by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, Mxfp4Config

    quantised = "quantization_config" in json.loads((folder / "config.json").read_text())
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if quantised else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).float().eval()


def cached(checkpoint: Path, cache: Path) -> Path:
    """Lay the files of `checkpoint` out as huggingface_hub's cache does; return the folder of the snapshot.

    models--NAME/snapshots/REVISION/FILE is a link to ../../blobs/HASH.
    """
    repository = cache / f"models--random--{checkpoint.name}"
    snapshot = repository / "snapshots" / hashlib.sha1(checkpoint.name.encode()).hexdigest()
    for folder in (snapshot, repository / "blobs"):
        folder.mkdir(parents=True)
    for path in sorted(checkpoint.iterdir()):
        blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        os.link(path, blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def without_data(checkpoint: Path, folder: Path) -> Path:
    """Copy `checkpoint` into `folder`, its weights all zeros in sparse files: header and size are as they were."""
    folder.mkdir(parents=True)
    for path in checkpoint.iterdir():
        content = path.read_bytes()
        if path.suffix == ".safetensors":
            header = 8 + int.from_bytes(content[:8], "little")
            (folder / path.name).write_bytes(content[:header])
            os.truncate(folder / path.name, len(content))
        else:
            (folder / path.name).write_bytes(content)
    return folder


QWEN3_30B_A3B: Mapping[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
}
"""config.json of Qwen/Qwen3-30B-A3B, as far as shapes and results depend on it: 61 GB of bfloat16."""


def empty(architecture: str, folder: Path, *, shard_bytes: int = 4_000_000_000, **config: Any) -> Path:
    """Write a checkpoint of any size whose weights are zeros in sparse files, which take no space; return `folder`.

    `config` are settings of the architecture's configuration; weights are bfloat16, named as on the hub.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    from models.qwen3_moe.build import byte_tokenizer

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **config), dtype=torch.bfloat16)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, tensor in revert_weight_conversion(model, model.state_dict()).items():
        if size + 2 * tensor.numel() > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tuple(tensor.shape)
        size += 2 * tensor.numel()
    folder.mkdir(parents=True)
    places = {}
    for number, shapes in enumerate(shards, 1):
        path = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_zeros(path, shapes)
        places |= dict.fromkeys(shapes, path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    model.config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def _write_zeros(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A sparse safetensors file of bfloat16 tensors."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (start, end)}
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    path.write_bytes(len(content).to_bytes(8, "little") + content)
    os.truncate(path, 8 + len(content) + end)


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor of the checkpoint in `folder`."""
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as content:
            found |= dict.fromkeys(content.keys(), path)
    return found


def _model(architecture: str, seed: int) -> Any:
    match architecture:
        case "qwen3_5_moe":
            return language_models.build_qwen3_5(seed)
        case "llama4":
            return language_models.build_llama4(seed, **_CHUNKED)
        case "gpt_oss_bfloat16":
            return language_models.build("gpt_oss", seed, **CHANGES["gpt_oss"])
    return language_models.build(architecture.removesuffix("_tied"), seed, **CHANGES[architecture])


def _spread(model: Any, seed: int) -> None:
    """Move norms and other vectors away from ones and zeros, so that no two are alike."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def _correction_biases(model: Any, seed: int) -> None:
    """Random biases of expert selection, in float32 as published; they are buffers or parameters."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        bias = getattr(module, "e_score_correction_bias", None)
        if isinstance(bias, torch.Tensor):
            bias.data = torch.randn(bias.shape, generator=generator) * 0.1


def _rewrite(path: Path, removed: tuple[str, ...], added: Mapping[str, Any]) -> None:
    from safetensors.torch import load_file, save_file

    kept = {name: tensor for name, tensor in load_file(path).items() if name not in removed}
    save_file({**kept, **added}, path, metadata={"format": "pt"})
    index = path.parent / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        for name in removed:
            del content["weight_map"][name]
        content["weight_map"] |= dict.fromkeys(added, path.name)
        index.write_text(json.dumps(content, indent=2))


def _to_mxfp4(folder: Path, seed: int) -> None:
    """Replace gpt-oss's experts `[E, in, out]` by random MXFP4 of openai/gpt-oss's layout.

    `<name>_blocks` is `[E, out, in / 32, 16]`, two codes to a byte and the lower nibble first; `<name>_scales` is
    `[E, out, in / 32]` (Open Compute Project, Microscaling Formats v1.0). Values are about as large as they were.
    """
    import torch
    from safetensors import safe_open

    generator = torch.Generator().manual_seed(seed)
    for name, path in tensor_files(folder).items():
        if name.endswith("_proj") and ".experts." in name:
            with safe_open(path, "pt") as content:
                experts, columns, rows = content.get_slice(name).get_shape()
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(122, 126, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
            _rewrite(path, (name,), {f"{name}_blocks": blocks, f"{name}_scales": scales})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    path.write_text(json.dumps(config, indent=2))


def main() -> None:
    """Write the checkpoint of an architecture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("architecture", choices=[*CHANGES, "large"], help="large: the shapes of Qwen3-30B-A3B, empty")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.architecture == "large":
        empty("qwen3_moe", arguments.folder, **QWEN3_30B_A3B)
    else:
        build(arguments.architecture, arguments.folder)


if __name__ == "__main__":
    main()

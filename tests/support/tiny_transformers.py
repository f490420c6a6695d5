"""Models of transformers that are small enough for tests, without dropout, which would differ by rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    Dinov2Config,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    MixtralConfig,
    Qwen3Config,
    ViTConfig,
)

WORDS, LENGTH = 20, 8

_STEADY: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.1}
_TINY: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_DECODER: dict[str, Any] = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": WORDS, "intermediate_size": 24, "max_position_embeddings": LENGTH, "initializer_range": 0.3},
}


def bert(kind: str = "BertForSequenceClassification", **options: Any) -> BertConfig:
    values: dict[str, Any] = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, **_TINY, **_STEADY, **options}
    return BertConfig(architectures=[kind], **values)


def gpt2(kind: str = "GPT2LMHeadModel", **options: Any) -> GPT2Config:
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    steady = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.3}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return GPT2Config(architectures=[kind], **{**sizes, **steady, **ends, **options})


def llama(kind: str = "LlamaForCausalLM", **options: Any) -> LlamaConfig:
    return LlamaConfig(architectures=[kind], **{**_DECODER, "pad_token_id": 0, **options})


def llava(**text_options: Any) -> LlavaConfig:
    """Of a model that is made of two others, by configurations within its own."""
    text = {**llama().to_dict(), **text_options}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    images = {"model_type": "clip_vision_model", **sizes, "image_size": 8, "patch_size": 4}
    kinds = {"architectures": ["LlavaForConditionalGeneration"], "image_token_index": WORDS - 1}
    return LlavaConfig(text_config=text, vision_config=images, **kinds)


def mixtral() -> MixtralConfig:
    """Of a model with experts, which transformers reads from other tensors than it has parameters."""
    return MixtralConfig(architectures=["MixtralForCausalLM"], num_local_experts=3, **_DECODER)


def qwen() -> Qwen3Config:
    """Of a model that normalises the heads, which each rank has a part of."""
    return Qwen3Config(architectures=["Qwen3ForCausalLM"], head_dim=4, pad_token_id=0, **_DECODER)


def lora() -> Any:
    """A causal model with random weights and LoRA's adapters."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2LMHeadModel

    return get_peft_model(GPT2LMHeadModel(gpt2()), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"]))


def prompts() -> Any:
    """The same with virtual tokens in front of each row."""
    from peft import PromptTuningConfig, get_peft_model
    from transformers import GPT2LMHeadModel

    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return get_peft_model(GPT2LMHeadModel(gpt2(n_positions=LENGTH + 2)), config)


def vit(**options: Any) -> ViTConfig:
    values: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_channels": 3, **_TINY, **_STEADY, **options}
    return ViTConfig(architectures=["ViTForImageClassification"], **values)


def dinov2() -> Dinov2Config:
    """Of a model whose feed-forward layers transformers splits where it reads them."""
    sizes = {"image_size": 8, "patch_size": 4, "num_channels": 3, "hidden_size": 16, "num_hidden_layers": 2}
    more = {"num_attention_heads": 2, "use_swiglu_ffn": True, "initializer_range": 0.1}
    return Dinov2Config(architectures=["Dinov2ForImageClassification"], **sizes, **more)


def masked(columns: Any, *, epoch: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Makes the arguments of `forward` in another order than it has them; 0 pads the ids."""
    ids = columns["ids"]
    return {"attention_mask": (ids != 0).long(), "input_ids": ids}


def causal(columns: Any, *, epoch: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """As `masked`, with the ids as labels, but for the padding."""
    ids = columns["ids"]
    return {"labels": ids.masked_fill(ids == 0, -100), **masked(columns, epoch=epoch, generator=generator)}


def shortened(columns: Any, *, epoch: int | None, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """As `causal`, padded to the longest of these rows, so that ranks have tensors of other lengths."""
    ids = columns["ids"]
    longest = max(2, int((ids != 0).sum(1).max()))
    return causal({"ids": ids[:, :longest]}, epoch=epoch, generator=generator)


def tokenizer_folder(folder: Path, words: list[str], config: Any) -> Path:
    """Writes a model with random weights and a WordPiece tokenizer of some words into a folder."""
    import transformers

    torch.manual_seed(0)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    config.vocab_size = len(names)
    getattr(transformers, config.architectures[0])(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(names))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    return folder

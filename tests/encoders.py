"""Tiny random encoders, made by transformers and written as their folders are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from cairn.config.config import Config
from cairn.engine.encoder import EncoderEngine
from cairn.models.hub.hub import demo_folder
from cairn.models.spec.config import load_spec
from cairn.text.tokens.gguf import SPLITS
from cairn.types.request import SamplingParams
from cairn.types.step import Row
from tests.tiny_models import write_model

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "max_position_embeddings": 300,
}
NOTHING = SamplingParams(max_tokens=0)

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "bert, tanh of gelu": ("Bert", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}),
    "bert, odd sizes": ("Bert", {"hidden_size": 36, "num_attention_heads": 6, "intermediate_size": 37}),
    "roberta": ("Roberta", {"type_vocab_size": 1, "pad_token_id": 1}),
    "xlm roberta": ("XLMRoberta", {"type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}),
    "modern bert": ("ModernBert", {"local_attention": 16, "num_hidden_layers": 4}),
    "modern bert, two of three": (
        "ModernBert",
        {"local_attention": 40, "global_attn_every_n_layers": 2, "norm_bias": True},
    ),
    "nomic bert": ("NomicBert", {}),
}
"""Every family, and unusual shapes that its arithmetic could get wrong."""

JUDGES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {"num_labels": 1}),
    "xlm roberta": ("XLMRoberta", {"num_labels": 1, "type_vocab_size": 1, "pad_token_id": 1}),
    "modern bert": ("ModernBert", {"num_labels": 1, "local_attention": 16}),
    "modern bert, mean": ("ModernBert", {"num_labels": 3, "classifier_pooling": "mean", "norm_bias": True}),
}


def write_encoder(folder: Path, family: str, task: str = "Model", pooling: str = "mean", **fields: Any) -> Any:
    """Write a random model to a folder; return transformers' own in float32."""
    torch.manual_seed(7)
    ids = {name: None for name in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")}
    config = getattr(transformers, f"{family}Config")(**{**SIZES, "pad_token_id": 0, **ids, **fields})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}{task}")(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            scale = 0.3 if tensor.ndim == 1 or "embed" in name else 1.2 / tensor.shape[-1] ** 0.5
            tensor.copy_(torch.randn(tensor.shape) * scale + ("norm" in name.lower() and name.endswith("weight")))
    model.save_pretrained(folder)
    if task == "Model":
        write_modules(folder, pooling)
    return model


def write_modules(folder: Path, pooling: str = "mean", dense: Sequence[torch.nn.Module] = ()) -> None:
    """Write the files that make a folder an embedding model. `dense`: a matrix for each module, perhaps with tanh."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    for number, (linear, *after) in enumerate(dense, 2):
        modules.append((f"{number}_Dense", "Dense"))
        (place := folder / modules[-1][0]).mkdir(exist_ok=True)
        named = f"torch.nn.modules.{'activation.Tanh' if after else 'linear.Identity'}"
        sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
        fields = {**sizes, "bias": linear.bias is not None, "activation_function": named}
        (place / "config.json").write_text(json.dumps(fields))
        save_file(
            {f"linear.{name}": tensor.detach() for name, tensor in linear.named_parameters()},
            place / "model.safetensors",
        )
    modules.append(("9_Normalize", "Normalize"))
    listed = [{"idx": n, "name": str(n), "path": p, "type": f"x.models.{t}"} for n, (p, t) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {"cls": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
    flags = {f"pooling_mode_{name}": mode == pooling for mode, name in modes.items()}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))


def write_tokenizer(folder: Path) -> Path:
    """Write a WordPiece tokenizer of letters, with BERT's template for texts and pairs."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), ".", "["]
    tokenizer = Tokenizer(models.WordPiece({piece: at for at, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(pieces[:5])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def write_reranker(folder: Path) -> Path:
    """Write a tiny decoder like Qwen3-Reranker, whose tokenizer has "yes" and "no"."""
    data = json.loads((demo_folder() / "tokenizer.json").read_text("utf-8"))
    data |= {"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": SPLITS["qwen2"]}}
    for token in ("yes", "no"):
        data["model"]["vocab"].setdefault(token, len(data["model"]["vocab"]) + len(data["added_tokens"]))
    count = max([*data["model"]["vocab"].values(), *(token["id"] for token in data["added_tokens"])]) + 1
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(data))
    write_model(folder, "Qwen3ForCausalLM", vocab_size=count, max_position_embeddings=900, tie_word_embeddings=True)
    return folder


def load_encoder(folder: Path, **options: Any) -> EncoderEngine:
    """Return the engine of a folder."""
    config = Config(**{"step_tokens": 512, "max_running": 16, "threads": 1, **options})
    return EncoderEngine.load(load_spec(folder), folder, config)


def text_row(tokens: list[int], second: int = 0) -> Row:
    """Return the row of a whole text."""
    count = len(tokens)
    return Row(tokens, 0, count, (), count - 1, count, NOTHING, 0, want="hidden", second=second)

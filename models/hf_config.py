"""config.json of a Hugging Face Llama: read strictly, written for transformers 4 and 5. Torch-free.

A key that this model does not know is refused, not dropped: the file may describe another model.
"""

import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from common.files import read_json
from common.text import printable, shown
from models.config import LlamaConfig, RopeScaling

REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)
# What transformers takes where the file is silent, which is not always this project's default;
# None follows from the other fields.
ASSUMED = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
# What this model computes; with another value the file describes another model.
ONLY = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "rope_interleaved": False,
    "is_llama_config": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "use_sliding_window": False,
    "pruned_heads": {},
}
ARCHITECTURES = ("LlamaForCausalLM", "LLaMAForCausalLM")
# Keys that say nothing of the function that the weights compute: of the format, of tokens, of how
# transformers runs, samples or initialises a model, and of other tools.
IGNORED = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled
    _from_model_config _name_or_path attn_implementation bad_words_ids begin_suppress_tokens
    bos_token_id chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    id2label initializer_range is_decoder keys_to_ignore_at_inference label2id length_penalty
    max_length max_new_tokens max_sequence_length min_length model_max_length name_or_path
    no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905
)


def read_hf_config(path: str | Path) -> tuple[dict, dict]:
    """Read the architecture from a Hugging Face config.json (or the directory that holds one).

    Returns:
        Keyword arguments for :class:`LlamaConfig`: what the file states, and what transformers
        assumes where it is silent.

    Raises:
        ValueError: in one line, as :func:`parse_hf_config`, or if the file cannot be read.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = read_json(file)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else printable(str(error))
        raise ValueError(f"{file} cannot be read: {reason}") from None
    try:
        return parse_hf_config(raw)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def parse_hf_config(raw: Any) -> tuple[dict, dict]:
    """The architecture in the content of a config.json, as :func:`read_hf_config` returns it.

    Both spellings are read: ``rope_theta`` and ``rope_scaling`` (with ``type`` or ``rope_type``),
    and the ``rope_parameters`` block of transformers 5. ``null`` states nothing.

    Raises:
        ValueError: in one line, if it is no Llama, has a key or a value that this model does not
            know, or says one thing in two ways.
    """
    if not isinstance(raw, dict):
        raise ValueError(f"is {shown(raw)}, not an object")
    raw = {key: value for key, value in raw.items() if value is not None}
    for key, value in ONLY.items():
        if raw.get(key, None if key == "model_type" else value) != value:
            raise ValueError(f"{key} is {shown(raw.get(key))}; only {value!r} is supported")
    _check_keys(raw)
    stated = {key: raw[key] for key in LlamaConfig.model_fields if key in raw}
    stated.pop("rope_scaling", None)
    stated |= _read_rope(raw)
    if missing := [key for key in REQUIRED if key not in stated]:
        raise ValueError(f"{', '.join(missing)} is missing")
    _validate(LlamaConfig, stated)
    return stated, {key: value for key, value in ASSUMED.items() if key not in stated}


def _check_keys(raw: dict) -> None:
    """Refuse unknown keys, another class than this model's, and two dtypes."""
    keys = {*LlamaConfig.model_fields, *ONLY, *IGNORED, "architectures", "rope_parameters"}
    if unknown := [f"{printable(key)[:80]} is {shown(raw[key])}" for key in raw.keys() - keys]:
        more = f", and {len(unknown) - 3} keys more" if len(unknown) > 3 else ""
        raise ValueError(
            f"{', '.join(sorted(unknown)[:3])}{more}, which this model does not know: if the "
            "weights compute the same without, remove the key from the file"
        )
    names = raw.get("architectures", [])
    if not isinstance(names, list) or any(name not in ARCHITECTURES for name in names):
        name = names[0] if isinstance(names, list) and len(names) == 1 else names
        raise ValueError(f"architectures is {shown(name)}; only {[ARCHITECTURES[0]]} is supported")
    _same("dtype", raw.get("dtype"), "torch_dtype", raw.get("torch_dtype"))


def _same(key: str, value: Any, other_key: str, other: Any) -> None:
    """Refuse two spellings of one thing that state two things; None states nothing."""
    if value is not None and other is not None and value != other:
        raise ValueError(
            f"{key} is {shown(value)}, and {other_key} is {shown(other)}: remove the wrong one"
        )


def _read_rope(raw: dict) -> dict:
    """What is stated of ``rope_theta`` and ``rope_scaling``, in any spelling."""
    theta_key, theta = "rope_theta", raw.get("rope_theta")
    scaling = None
    for key in ("rope_parameters", "rope_scaling"):
        block = raw.get(key, {})
        if not isinstance(block, dict):
            raise ValueError(f"{key} is {shown(block)}; it must be an object")
        block = {name: value for name, value in block.items() if value is not None}
        _same(theta_key, theta, f"{key}.rope_theta", block.get("rope_theta"))
        if "rope_theta" in block:
            theta_key, theta = f"{key}.rope_theta", block.pop("rope_theta")
        if not block:
            continue
        block = _read_rope_block(key, block)
        if scaling is not None and scaling != block:
            raise ValueError("rope_parameters and rope_scaling differ: remove the wrong one")
        scaling = block
    if theta is not None and (type(theta) not in (int, float) or not 0 < theta < math.inf):
        raise ValueError(f"{theta_key} is {shown(theta)}; it must be a positive number")
    stated = {"rope_theta": theta, "rope_scaling": scaling or None}
    return {key: value for key, value in stated.items() if value is not None}


def _read_rope_block(key: str, block: dict) -> dict:
    """The fields of :class:`RopeScaling`, or nothing for the default type."""
    _same(f"{key}.rope_type", block.get("rope_type"), f"{key}.type", block.get("type"))
    kind = block.pop("type", "default")
    kind = block.pop("rope_type", kind)
    partial = block.pop("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ValueError(f"{key}.partial_rotary_factor is {shown(partial)}; only 1.0 is supported")
    if kind not in ("default", "llama3"):
        raise ValueError(
            f"{key}.rope_type is {shown(kind)}; only 'default' and 'llama3' are supported"
        )
    if kind == "llama3":
        _validate(RopeScaling, block, f"{key}.")
        return {"rope_type": kind, **block}
    if block:
        name, value = next(iter(block.items()))
        raise ValueError(
            f"{key}.{printable(name)[:80]} is {shown(value)}, which rope type 'default' does not "
            "know"
        )
    return {}


def _validate(model: type[BaseModel], fields: dict, inside: str = "") -> None:
    """Check the values in the file, or ``inside`` a key of it, without converting their types."""
    try:
        model.model_validate(fields, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = printable(inside + ".".join(map(str, first["loc"])))[:80]
        if first["type"] == "missing":
            raise ValueError(f"{key} is missing") from None
        raise ValueError(f"{key} is {shown(first['input'])}: {first['msg']}") from None


def hf_config(
    config: LlamaConfig,
    *,
    seq_len: int,
    dtype: str,
    bos_token_id: int | None,
    eos_token_id: int | None,
) -> dict:
    """The config.json of ``config``, in the spellings of transformers 4 and 5.

    Args:
        seq_len: tokens per sequence of the training. A longer ``max_position_embeddings`` stays;
            where none is stated, it is the length that the rotary scaling stretches to.
        dtype: of the weights, as in "bfloat16".
    """
    scaling, longest = config.rope_scaling, config.max_position_embeddings
    if scaling:
        longest = longest or int(scaling.factor * scaling.original_max_position_embeddings)
        scaling = scaling.model_dump()
    rope = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}
    as_they_are = (*REQUIRED, "rms_norm_eps", "tie_word_embeddings", "rope_theta")
    return {
        "architectures": [ARCHITECTURES[0]],
        **{key: ONLY[key] for key in ("model_type", "hidden_act", "attention_bias", "mlp_bias")},
        **{key: getattr(config, key) for key in as_they_are},
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": max(seq_len, longest or 0),
        "rope_parameters": rope,
        "rope_scaling": scaling,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
    }

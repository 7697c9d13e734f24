"""config.json of Hugging Face: what is understood, what is assumed, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from models.config import LlamaConfig
from models.hf_config import read_hf_config
from training.config.command_line import parse_flags

ROOT = Path(__file__).parents[2]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TYPED_SCALING = {("type" if key == "rope_type" else key): SCALING[key] for key in SCALING}


def read(folder: Path, **keys) -> tuple[dict, dict]:
    (folder / "config.json").write_text(json.dumps(LLAMA | keys))
    return read_hf_config(folder)


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        read_hf_config(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'config.json'}") and message.isprintable()
    assert len(message) < 600
    return message


OF_THE_HUB = {
    "first": {
        "architectures": ["LLaMAForCausalLM"],
        "max_sequence_length": 2048,
        "pad_token_id": -1,
        "torch_dtype": "float16",
        "transformers_version": "4.27.0.dev0",
    },
    "llama-2": {
        "_name_or_path": "meta-llama/Llama-2-7b-hf",
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "pretraining_tp": 2,
        "rope_scaling": None,
        "use_cache": True,
    },
    "llama-3.1": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": [1, 3, 4],
        "mlp_bias": False,
        "head_dim": 16,
        "rope_scaling": SCALING,
        "rope_theta": 500000.0,
    },
    "smollm": {
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_theta": 100000,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "of-transformers-5": {
        "dtype": "bfloat16",
        "rope_parameters": {"rope_theta": 500000.0, **SCALING},
    },
    "unsloth": {"unsloth_version": "2025.1", "unsloth_fixed": True, "_attn_implementation": "x"},
    "sampling": {"temperature": 0.6, "top_p": 0.9, "max_length": 4096, "do_sample": True},
    "null-of-another": {"sliding_window": None, "quantization_config": None, "head_dim": None},
    "both-spellings": {
        "rope_theta": 10000,
        "rope_scaling": TYPED_SCALING,
        "rope_parameters": {"rope_theta": 10000.0, **SCALING},
        "dtype": "float32",
        "torch_dtype": "float32",
    },
    "theta-in-a-block-alone": {"rope_scaling": SCALING, "rope_parameters": {"rope_theta": 1e6}},
}


@pytest.mark.parametrize("keys", OF_THE_HUB.values(), ids=OF_THE_HUB)
def test_configs_of_the_hub_are_read(keys, tmp_path):
    stated, assumed = read(tmp_path, **keys)
    config = LlamaConfig(**stated, **assumed)
    rope = {"rope_theta": keys.get("rope_theta", 10000.0), **keys.get("rope_parameters", {})}
    assert config.rope_theta == rope["rope_theta"]
    assert (config.rope_scaling is not None) == ("factor" in json.dumps(keys))
    assert not stated.keys() & assumed.keys()


X = "which this model does not know: if the weights compute the same without, remove"
REFUSED = {
    # What it may be another model by.
    "sliding_window": (4096, f"sliding_window is 4096, {X}"),
    "quantization_config": ({"bits": 4}, f"quantization_config is an object of 1 keys, {X}"),
    "final_logit_softcapping": (30.0, X),
    "use_qk_norm": (True, X),
    "is_causal": (False, X),
    "no_rope_layers": ([1, 0], X),
    "logits_scaling": (8.0, X),
    "auto_map": ({"AutoModelForCausalLM": "x.Y"}, X),
    "\x1b[31m\n": ("\x1b]0;x\x07" * 1000, r"\x1b[31m\n is '\x1b]0;x\x07"),
    "architectures": (["MistralForCausalLM"], "only ['LlamaForCausalLM'] is supported"),
    "hidden_act": ("gelu", "hidden_act is 'gelu'; only 'silu' is supported"),
    "attention_bias": (True, "attention_bias is True; only False"),
    "rope_interleaved": (True, "rope_interleaved is True; only False"),
    "partial_rotary_factor": (0.5, "partial_rotary_factor is 0.5; only 1.0"),
    "attention_dropout": (0.1, "attention_dropout is 0.1; only 0.0"),
    # Types are not guessed.
    "hidden_size": (64.0, "hidden_size is 64.0: Input should be a valid integer"),
    "num_hidden_layers": (True, "num_hidden_layers is True: Input should be a valid integer"),
    "num_key_value_heads": (0, "num_key_value_heads is 0: Input should be greater than 0"),
    "tie_word_embeddings": ("yes", "tie_word_embeddings is 'yes': Input should be a valid boolean"),
    "rms_norm_eps": ("1e-5", "rms_norm_eps is '1e-5': Input should be a valid number"),
    "vocab_size": (None, "vocab_size is missing"),
    "rope_scaling": (
        TYPED_SCALING | {"rope_type": "linear"},
        "rope_scaling.rope_type is 'linear', and rope_scaling.type is 'llama3': remove",
    ),
    "rope_parameters": (
        {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
        "rope_parameters.full_attention is an object of 1 keys, which rope type 'default' does not",
    ),
}
THETAS = ["500000", True, [1], {}, 0, -1, float("nan"), float("inf")]
BLOCKS = {
    "theta-twice": (
        {"rope_theta": 10000, "rope_parameters": {"rope_theta": 500000.0}},
        "rope_theta is 10000, and rope_parameters.rope_theta is 500000.0: remove the wrong one",
    ),
    "text-in-a-block": (
        {"rope_parameters": {"rope_theta": "5"}},
        "rope_parameters.rope_theta is '5'; it must be a positive number",
    ),
    "two-blocks": (
        {"rope_scaling": SCALING, "rope_parameters": {"rope_type": "default"}},
        "rope_parameters and rope_scaling differ: remove the wrong one",
    ),
    "two-dtypes": ({"dtype": "bfloat16", "torch_dtype": "float32"}, "and torch_dtype is 'float32'"),
    "list": ({"rope_scaling": [1]}, "rope_scaling is a list of 1; it must be an object"),
    "no-type": ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.factor is 4.0, which rope type"),
    "linear": ({"rope_scaling": {"type": "linear"}}, "rope_scaling.rope_type is 'linear'; only"),
    "unknown": ({"rope_scaling": SCALING | {"beta": 1}}, "rope_scaling.beta is 1: Extra"),
    "missing": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
        "rope_scaling.low_freq_factor is missing",
    ),
    "partial": (
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor is 0.5; only 1.0 is supported",
    ),
    **{key: ({key: value}, said) for key, (value, said) in REFUSED.items()},
    **{
        f"theta-{value}": ({"rope_theta": value}, "it must be a positive number")
        for value in THETAS
    },
}


@pytest.mark.parametrize("keys, said", BLOCKS.values(), ids=BLOCKS)
def test_what_is_not_understood_is_refused(keys, said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | keys))
    assert said in refusal(tmp_path)


FILES = {
    "deep": (b"[" * 10**5, "is nested too deeply"),
    "twice": (
        b'{"model_type": "llama", "hidden_size": 1, "hidden_size": 2}',
        "'hidden_size' twice",
    ),
    "overflow": (json.dumps(LLAMA)[:-1].encode() + b', "rope_theta": 1e999}', "rope_theta is inf"),
    "list": (b"[]", "is a list of 0, not an object"),
    "empty": (b"", "cannot be read"),
    "bytes": (b"\xff\xfe\0", "cannot be read"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "cannot be read"),
    "large": (b" " * (1 << 26) + b"{}", "has more than the 67,108,864 bytes"),
}


@pytest.mark.parametrize("content, said", FILES.values(), ids=FILES)
def test_refused_files(content, said, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    assert said in refusal(tmp_path)


def test_refused_kinds_of_files(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert "is no regular file" in refusal(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("/dev/zero")
    assert "is no regular file" in refusal(tmp_path)


def test_what_is_assumed_is_said(tmp_path, capsys):
    """In one line, without what a flag states."""
    read(tmp_path, rms_norm_eps=1e-5)
    config = parse_flags(["--model-config", str(tmp_path)])
    assert (config.model.rope_theta, config.model.kv_heads) == (10000.0, 4)
    assert capsys.readouterr().err.splitlines() == [
        "--model-config: assumed num_key_value_heads 4, head_dim 16, rope_theta 10000.0, "
        "tie_word_embeddings False, which config.json does not state"
    ]
    flags = ["--rope-theta", "7", "--num-key-value-heads", "2", "--head-dim", "8"]
    parse_flags(["--model-config", str(tmp_path), *flags, "--tie-word-embeddings"])
    assert capsys.readouterr().err == ""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"rope_theta": "5"}))
    with pytest.raises(ConfigError, match=r"/config.json: rope_theta is '5'; it"):
        parse_flags(["--model-config", str(tmp_path)])


def test_refused_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text("[" * 10**5)
    command = [sys.executable, "train_llm.py", "--model-config", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"train_llm.py: error: --model-config {tmp_path}/config.json cannot be read: "
        "is nested too deeply\n"
    )


def test_frequency_factors_that_meet():
    """They are divided by their difference."""
    scaling = SCALING | {"high_freq_factor": 1.0}
    error = LlamaConfig(rope_scaling=scaling).architecture_error()
    assert error == "--rope-scaling: high_freq_factor 1.0 must be above low_freq_factor 1.0"

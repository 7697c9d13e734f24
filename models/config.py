"""The architecture of a Llama, in the field names of Hugging Face's config.json. Torch-free."""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from models.weights import all_weights, block_weights, embedding_weight, head_weights

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]

# Beyond what anybody trains: what is counted, listed or named for each of them stays feasible.
LARGEST = {"hidden_size": 2**20, "intermediate_size": 2**24, "num_hidden_layers": 2_000}
LARGEST |= {"num_attention_heads": 2**16, "num_key_value_heads": 2**16, "head_dim": 2**16}
LARGEST |= {"vocab_size": 2**27, "max_position_embeddings": 2**40}


class RopeScaling(BaseModel):
    """Llama 3.1's frequency scaling: wavelengths longer than the original context are stretched.

    Source: the ``rope_scaling`` block of Llama-3.1's config.json.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    rope_type: Literal["llama3"] = "llama3"
    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_max_position_embeddings: PositiveInt


class LlamaConfig(BaseModel):
    """What is trained: the fields of config.json."""

    model_config = ConfigDict(extra="forbid")

    hidden_size: PositiveInt = Field(256, description="Width D of the residual stream.")
    intermediate_size: PositiveInt = Field(1024, description="Width F of the SwiGLU feed-forward.")
    num_hidden_layers: PositiveInt = Field(4, description="Number L of transformer blocks.")
    num_attention_heads: PositiveInt = Field(16, description="Number H of query heads.")
    num_key_value_heads: PositiveInt | None = Field(
        None, description="Number K of key/value heads; none: as many as query heads."
    )
    head_dim: PositiveInt | None = Field(
        None, description="Width of one head, even; none: hidden size / heads."
    )
    vocab_size: PositiveInt | None = Field(
        None, description="Vocabulary V in tokens; none: the tokenizer's."
    )
    rope_theta: PositiveFloat = Field(500000.0, description="Base of the rotary frequencies.")
    rope_scaling: RopeScaling | None = Field(
        None, description="Llama-3.1 rotary scaling as a JSON object; none turns it off."
    )
    rms_norm_eps: PositiveFloat = Field(1e-5, description="Epsilon inside the RMSNorm root.")
    tie_word_embeddings: bool = Field(
        False, description="Share one matrix between the token embedding and the output head."
    )
    max_position_embeddings: PositiveInt | None = Field(
        None,
        description="Longest sequence, only written on export; none: the length trained on, or "
        "what the rotary scaling stretches to.",
    )

    @property
    def vocabulary(self) -> int:
        """Vocabulary V in tokens.

        Raises:
            ValueError: if ``vocab_size`` is None, as before a tokenizer is read.
        """
        if self.vocab_size is None:
            raise ValueError("vocab_size is not set")
        return self.vocab_size

    @property
    def kv_heads(self) -> int:
        """Number K of key/value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def num_matmul_parameters(self) -> int:
        """Parameters that every token is multiplied with: all but the embedding and the norms."""
        ends = [embedding_weight(self), *head_weights(self)]
        block = sum(weight.numel for weight in block_weights(self) if weight.in_matmul)
        return self.num_hidden_layers * block + sum(w.numel for w in ends if w.in_matmul)

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every trained parameter; a tied head is the embedding, and left out."""
        return {name: weight.shape for name, weight in all_weights(self).items()}

    @property
    def num_parameters(self) -> int:
        """All trained parameters; a tied embedding counts once."""
        return sum(map(math.prod, self.parameter_shapes.values()))

    def architecture_error(self) -> str | None:
        """One line naming what is too large, or does not fit together inside the model, or None."""
        for name, most in LARGEST.items():
            if (size := getattr(self, name) or 0) > most:
                return (
                    f"--{name.replace('_', '-')} {size} is more than the {most} that are possible"
                )
        h, k = self.num_attention_heads, self.kv_heads
        if h % k:
            return f"--num-key-value-heads {k} must divide --num-attention-heads {h}"
        if self.head_dim is None and self.hidden_size % h:
            return (
                f"--num-attention-heads {h} does not divide --hidden-size {self.hidden_size}: "
                "change one of them or set --head-dim"
            )
        if self.head_size % 2:
            return f"--head-dim {self.head_size} is odd: rotary embedding needs an even head width"
        scaling = self.rope_scaling
        if scaling and scaling.high_freq_factor <= scaling.low_freq_factor:
            return (
                f"--rope-scaling: high_freq_factor {scaling.high_freq_factor} must be above "
                f"low_freq_factor {scaling.low_freq_factor}"
            )
        return None


def flops_per_token(model: LlamaConfig, seq_len: int, causal: bool = False) -> int:
    """FLOPs of the forward and backward pass per token, a multiply-add counted as two.

    6 per matrix parameter, and 12 * L * H * head size * S for the two products of attention, whose
    causal half is subtracted only on request. The embedding lookup and all that is elementwise are
    free, and so is what activation checkpointing computes again. Source: PaLM (arXiv:2204.02311),
    appendix B.
    """
    attention = model.num_hidden_layers * model.num_attention_heads * model.head_size * seq_len
    return 6 * model.num_matmul_parameters + (6 if causal else 12) * attention

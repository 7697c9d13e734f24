"""A Llama 3 with Hugging Face's parameter names. It knows nothing of meshes.

Shapes: B micro-batch, S sequence, D hidden, H query heads, K key/value heads, F feed-forward,
V vocabulary. Under tensor parallelism a rank has its own heads, feed-forward columns and
vocabulary rows; local sizes follow from the local weights, and with sequence parallelism the
residual stream is [B, S / tp, D].
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.config import LlamaConfig
from models.layers import MLP, Attention, Embedding, Head, Layer, RMSNorm, rope_tables


class Block(Layer):
    """One transformer block, normalised before attention and before the feed-forward."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]; under sequence parallelism only x is a slice of S."""
        return (self.run or self.layer)(x, cos, sin)

    def layer(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What :meth:`forward` computes."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(Layer):
    """Everything below the output head; :class:`Llama` runs it.

    A pipeline stage has some of the blocks; embedding and norm are None where they are elsewhere.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        # By number, so that a part of the model keeps the names of the whole.
        self.layers = nn.ModuleDict(
            {str(i): Block(config) for i in range(config.num_hidden_layers)}
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(Layer):
    """Llama 3 language model, or a pipeline stage of one. ``config.vocab_size`` must be set."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = Head(config.hidden_size, config.vocab_size)
        self._rope = {}
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make head and embedding one parameter where the config asks for it.

        To be called again after anything that replaces parameters, since that unties them.
        """
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def to_empty(self, *, device: torch.device | str, recurse: bool = True) -> "Llama":
        """As for any module; tied weights, which torch would make two, stay one."""
        super().to_empty(device=device, recurse=recurse)
        self.tie_weights()
        return self

    def forward(
        self, tokens: Tensor, loss: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> Tensor:
        """Token ids [B, S] -> logits [B, S, local V].

        With ``loss`` the logits are left to it: it is given the last hidden states [B, S, D] and
        the local weight of the head [local V, D], and its result is returned. A pipeline stage
        takes and returns hidden states at the ends that are on other stages.
        """
        x, decoder = tokens, self.model
        if decoder.embed_tokens is not None:
            x = decoder.embed_tokens(x)
        cos, sin = self._rope_tables(x.shape[1] * self.sequence_shards, x)
        for block in decoder.layers.values():
            x = block(x, cos, sin)
        if decoder.norm is not None:
            x = decoder.norm(x)
        return x if self.lm_head is None else self.lm_head(x, loss)

    def _rope_tables(self, seq_len: int, like: Tensor) -> tuple[Tensor, Tensor]:
        # Not buffers: to_empty() would leave them uninitialised, and a cast would round them.
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        key = (seq_len, like.device, dtype)
        if key not in self._rope:
            tables = rope_tables(self.config, self.positions(seq_len), dtype)
            self._rope = {key: tuple(table.to(like.device) for table in tables)}
        return self._rope[key]

"""Decoder-only transformers as shapes: parameters, bytes and KV per token.

Two counts are easy to confuse. Grouped-query attention shrinks K and V projections and the KV
cache, but attention FLOPs follow the *query* heads. And in a mixture of experts a layer *holds*
all experts, *computes* top_k of them per token, and *reads* as many distinct ones as its tokens
touch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from policies.plan.op import Scope


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape of a model; sizes in elements unless a name says bytes.

    MoE: layers from ``n_dense_layers`` on have ``n_experts`` experts of width ``d_expert``,
    ``top_k`` active, and ``n_shared_experts`` always active; earlier layers are dense with
    ``d_ffn``. MLA: ``kv_latent_dim > 0`` caches one latent of ``kv_latent_dim + rope_dim`` per
    token instead of K and V; ``q_lora_rank`` 0 means that queries are projected directly.
    """

    name: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ffn: int
    vocab: int
    max_positions: int
    gated_ffn: bool
    tied_embeddings: bool
    learned_positions: int = 0  # rows of a learned position table
    linear_bias: bool = False  # biases on every linear layer (OPT)
    qkv_bias: bool = False  # biases on Q, K and V only (Qwen2)
    norm_bias: bool = False  # LayerNorm (weight and bias) instead of RMSNorm
    qk_norm: bool = False  # RMSNorm over each head of Q and K (Qwen3)
    n_experts: int = 0
    top_k: int = 0
    d_expert: int = 0
    n_shared_experts: int = 0
    router_bias: bool = False  # one routing bias per expert (DeepSeek-V3)
    n_dense_layers: int = 0
    kv_latent_dim: int = 0
    rope_dim: int = 0
    q_lora_rank: int = 0
    nope_dim: int = 0
    v_head_dim: int = 0
    weight_bytes_per_elem: float = 2.0
    kv_bytes_per_elem: float = 2.0

    def __post_init__(self) -> None:
        positive = (
            "n_layers",
            "d_model",
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "d_ffn",
            "vocab",
            "max_positions",
            "weight_bytes_per_elem",
            "kv_bytes_per_elem",
        )
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"model.{name}: {getattr(self, name)} must be positive")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"model.n_kv_heads: {self.n_kv_heads} must divide n_heads {self.n_heads}"
            )
        if self.n_experts:
            if not 1 <= self.top_k <= self.n_experts:
                raise ValueError(f"model.top_k: {self.top_k} must be in 1..{self.n_experts}")
            if self.d_expert < 1:
                raise ValueError(f"model.d_expert: {self.d_expert} must be positive with experts")
        if not 0 <= self.n_dense_layers <= self.n_layers:
            change = f"lower it, or raise model.n_layers to {self.n_dense_layers} or more"
            raise ValueError(
                f"model.n_dense_layers: {self.n_dense_layers} must be in 0..{self.n_layers}, the "
                f"number of layers; {change if self.n_dense_layers > 0 else 'raise it'}"
            )
        if self.kv_latent_dim and not (self.rope_dim and self.nope_dim and self.v_head_dim):
            raise ValueError("model.kv_latent_dim: MLA needs rope_dim, nope_dim and v_head_dim")
        self._refuse_uncounted()

    def _refuse_uncounted(self) -> None:
        """Refuse fields that the counts below would ignore (or count as less than nothing)."""
        moe = ("top_k", "d_expert", "n_shared_experts", "router_bias", "n_dense_layers")
        mla = ("rope_dim", "q_lora_rank", "nope_dim", "v_head_dim")
        for name in ("learned_positions", "n_experts", "kv_latent_dim", *moe, *mla):
            if getattr(self, name) < 0:
                raise ValueError(f"model.{name}: {getattr(self, name)} must be >= 0")
        for switch, names in (("n_experts", moe), ("kv_latent_dim", mla)):
            for name in names:
                if getattr(self, name) and not getattr(self, switch):
                    raise ValueError(f"model.{name}: {getattr(self, name)} needs {switch} > 0")
        if self.linear_bias and (self.n_experts or self.kv_latent_dim):
            raise ValueError("model.linear_bias: true must be false with experts or MLA")
        if (self.qkv_bias or self.qk_norm) and self.kv_latent_dim:
            raise ValueError("model.qkv_bias, model.qk_norm: true must be false with MLA")
        if self.n_experts and not self.gated_ffn:
            raise ValueError("model.gated_ffn: false must be true with experts")

    # ---- what one layer holds -------------------------------------------------------------

    def is_moe(self, layer: int) -> bool:
        """Whether a layer routes its tokens to experts."""
        return self.n_experts > 0 and layer >= self.n_dense_layers

    def attention_matrices(self) -> dict[str, int]:
        """Elements of each linear layer of attention, biases and inner norms included."""
        d, h, kv, dh = self.d_model, self.n_heads, self.n_kv_heads, self.head_dim
        if self.kv_latent_dim:
            q_dim = h * (self.nope_dim + self.rope_dim)
            latent, rank = self.kv_latent_dim, self.q_lora_rank
            queries = (
                {"q_down": d * rank + rank, "q_up": rank * q_dim} if rank else {"q": d * q_dim}
            )
            return queries | {
                "kv_down": d * (latent + self.rope_dim) + latent,
                "kv_up": latent * h * (self.nope_dim + self.v_head_dim),
                "out": h * self.v_head_dim * d,
            }
        in_bias = self.linear_bias or self.qkv_bias
        head_norm = dh if self.qk_norm else 0
        return {
            "q": d * h * dh + (h * dh if in_bias else 0) + head_norm,
            "k": d * kv * dh + (kv * dh if in_bias else 0) + head_norm,
            "v": d * kv * dh + (kv * dh if in_bias else 0),
            "out": h * dh * d + (d if self.linear_bias else 0),
        }

    def mlp_matrices(self, layer: int) -> dict[str, int]:
        """Elements of each linear layer of the MLP; all experts count as one entry."""
        d = self.d_model
        if self.is_moe(layer):
            shared = 3 * d * self.d_expert * self.n_shared_experts
            router = d * self.n_experts + (self.n_experts if self.router_bias else 0)
            return {
                "router": router,
                "experts": self.n_experts * 3 * d * self.d_expert,
                **({"shared": shared} if shared else {}),
            }
        up = d * self.d_ffn + (self.d_ffn if self.linear_bias else 0)
        down = d * self.d_ffn + (d if self.linear_bias else 0)
        return ({"gate": up} if self.gated_ffn else {}) | {"up": up, "down": down}

    @property
    def _norm(self) -> int:
        return self.d_model * (2 if self.norm_bias else 1)

    def layer_params(self, layer: int, scope: Scope = Scope.LAYER) -> int:
        """Parameters of one layer, or of its attention or MLP (each with its norm)."""
        if scope is Scope.LAYER:
            return sum(self.layer_params(layer, half) for half in (Scope.ATTENTION, Scope.MLP))
        if scope is Scope.ATTENTION:
            return sum(self.attention_matrices().values()) + self._norm
        if scope is Scope.MLP:
            return sum(self.mlp_matrices(layer).values()) + self._norm
        raise ValueError(
            f"scope: {scope} holds no weights of its own, must be layer, attention, mlp"
        )

    def layer_bytes(self, layer: int, scope: Scope = Scope.LAYER) -> int:
        """Bytes of one layer's weights, or of its attention or MLP.

        A layer is the sum of its halves, each rounded to whole bytes, so that loading it in one
        piece or in two moves the same bytes at any width (0.5 for four bits).
        """
        if scope is Scope.LAYER:
            halves = (Scope.ATTENTION, Scope.MLP)
            return sum(self.layer_bytes(layer, half) for half in halves)
        return round(self.layer_params(layer, scope) * self.weight_bytes_per_elem)

    def layers_bytes(self, start: int = 0) -> int:
        """Bytes of the weights of all layers from ``start`` on."""
        return sum(n * self.layer_bytes(i) for i, n in self._layer_kinds(start))

    def _layer_kinds(self, start: int = 0) -> Iterator[tuple[int, int]]:
        """A layer of every kind, dense and with experts, and how many there are from ``start``."""
        first_moe = self.n_dense_layers if self.n_experts else self.n_layers
        for first, end in ((start, first_moe), (max(start, first_moe), self.n_layers)):
            if first < end:
                yield first, end - first

    @property
    def edge_params(self) -> int:
        """Parameters outside the layers: embeddings, positions, final norm, untied head."""
        tables = 1 if self.tied_embeddings else 2
        return (
            tables * self.vocab * self.d_model + self.learned_positions * self.d_model + self._norm
        )

    @property
    def edge_bytes(self) -> int:
        """Bytes of the weights outside the layers."""
        return round(self.edge_params * self.weight_bytes_per_elem)

    # ---- totals ---------------------------------------------------------------------------

    @property
    def n_params(self) -> int:
        """All parameters."""
        return self.edge_params + sum(n * self.layer_params(i) for i, n in self._layer_kinds())

    @property
    def n_params_active(self) -> int:
        """Parameters that one token's forward multiplies with, embeddings included."""
        if not self.n_experts:
            return self.n_params
        idle = (self.n_experts - self.top_k) * 3 * self.d_model * self.d_expert
        return self.n_params - (self.n_layers - self.n_dense_layers) * idle

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.edge_bytes + self.layers_bytes()

    # ---- KV -------------------------------------------------------------------------------

    @property
    def kv_elems_per_token_layer(self) -> int:
        """Cached elements per token and layer: ``2 * n_kv * d_head``, or the MLA latent."""
        if self.kv_latent_dim:
            return self.kv_latent_dim + self.rope_dim
        return 2 * self.n_kv_heads * self.head_dim

    @property
    def kv_bytes_per_token_layer(self) -> float:
        """KV bytes per token and layer."""
        return self.kv_elems_per_token_layer * self.kv_bytes_per_elem

    @property
    def kv_bytes_per_token(self) -> float:
        """B_kv, KV bytes per token over all layers (arXiv 2601.19910 Table 3)."""
        return self.n_layers * self.kv_bytes_per_token_layer

    # ---- matrices that a forward multiplies with ------------------------------------------

    @property
    def qk_dim(self) -> int:
        """Width of one query head's score."""
        return self.nope_dim + self.rope_dim if self.kv_latent_dim else self.head_dim

    @property
    def v_dim(self) -> int:
        """Width of one query head's output."""
        return self.v_head_dim if self.kv_latent_dim else self.head_dim

    def experts_touched(self, layer: int, rows: int) -> float:
        """Expected distinct experts that ``rows`` tokens touch under uniform routing."""
        if not self.is_moe(layer):
            return 0.0
        return self.n_experts * (1.0 - (1.0 - self.top_k / self.n_experts) ** rows)

"""One layer of the two towers: the same parts twice, one for captions and one for what is generated."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import silu

from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.layers.attention import attend
from models.cosmos3_policy.layers.attention_plan import Plan
from models.cosmos3_policy.layers.norm import RMSNorm
from models.cosmos3_policy.layers.rotary import rotate

Table = tuple[Tensor, Tensor]


class MLP(nn.Module):
    """SwiGLU without biases."""

    def __init__(self, config: Cosmos3PolicyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Projections of both towers; `to_*` and `norm_q`, `norm_k` are the captions'."""

    def __init__(self, config: Cosmos3PolicyConfig) -> None:
        super().__init__()
        width, d = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * d, config.num_key_value_heads * d
        self.head_dim = d
        self.to_q = nn.Linear(width, queries, bias=False)
        self.to_k = nn.Linear(width, keys, bias=False)
        self.to_v = nn.Linear(width, keys, bias=False)
        self.to_out = nn.Linear(queries, width, bias=False)
        self.norm_q = RMSNorm(d, eps=config.rms_norm_eps)
        self.norm_k = RMSNorm(d, eps=config.rms_norm_eps)
        self.add_q_proj = nn.Linear(width, queries, bias=False)
        self.add_k_proj = nn.Linear(width, keys, bias=False)
        self.add_v_proj = nn.Linear(width, keys, bias=False)
        self.to_add_out = nn.Linear(queries, width, bias=False)
        self.norm_added_q = RMSNorm(d, eps=config.rms_norm_eps)
        self.norm_added_k = RMSNorm(d, eps=config.rms_norm_eps)

    def understand(self, x: Tensor, table: Table, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
        """Caption tokens [S, width] -> their output, keys and values [S, kv_heads, d]."""
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.to_q, self.to_k, self.to_v))
        q, k = rotate(self.norm_q(q), table), rotate(self.norm_k(k), table)
        return self.to_out(attend(q, k, v, plan)), k, v

    def forward(self, x: Tensor, context: tuple[Tensor, Tensor], table: Table, plan: Plan) -> Tensor:
        """Generated tokens [G, width] over the captions' keys and values and their own."""
        projections = (self.add_q_proj, self.add_k_proj, self.add_v_proj)
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in projections)
        q, k = rotate(self.norm_added_q(q), table), rotate(self.norm_added_k(k), table)
        return self.to_add_out(attend(q, k, v, plan, context))


class Layer(nn.Module):
    """Pre-norm attention and MLP. `forward` is the generation tower's, `understand` the captions'."""

    def __init__(self, config: Cosmos3PolicyConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.mlp_moe_gen = MLP(config)
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.input_layernorm_moe_gen = RMSNorm(width, eps=eps)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        self.post_attention_layernorm_moe_gen = RMSNorm(width, eps=eps)

    def understand(self, x: Tensor, table: Table, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
        """Captions [S, width] -> the same after this layer, and its keys and values [S, kv_heads, d]."""
        out, key, value = self.self_attn.understand(self.input_layernorm(x), table, plan)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), key, value

    def forward(self, x: Tensor, key: Tensor, value: Tensor, table: Table, plan: Plan) -> Tensor:
        """Generated tokens [G, width], given the captions' keys and values of this layer."""
        x = x + self.self_attn(self.input_layernorm_moe_gen(x), (key, value), table, plan)
        return x + self.mlp_moe_gen(self.post_attention_layernorm_moe_gen(x))

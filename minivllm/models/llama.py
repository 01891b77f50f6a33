"Llama: pre-norm decoder layers of attention and a gated MLP around one residual stream"
import torch
from torch import nn

from minivllm.config import ModelConfig
from minivllm.distributed import SINGLE
from minivllm.layers.activation import SiluAndMul
from minivllm.layers.attention import Attention, ForwardContext, TorchAttentionBackend
from minivllm.layers.embedding_head import ParallelLMHead, VocabParallelEmbedding
from minivllm.layers.layernorm import RMSNorm
from minivllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from minivllm.layers.rotary_embedding import RotaryEmbedding
from minivllm.models.registry import register_model


class LlamaAttention(nn.Module):
    "Projection into heads, attention, projection back"
    def __init__(self, config: ModelConfig, layer_idx: int, rope: RotaryEmbedding, backend=TorchAttentionBackend, tp=SINGLE):
        super().__init__()
        self.qkv_proj = QKVParallelLinear(config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads,
                                          bias=config.attention_bias, tp=tp)
        self.o_proj = RowParallelLinear(config.num_heads * config.head_dim, config.hidden_size,
                                        bias=config.attention_bias, tp=tp)
        self.attn = Attention(self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, config.head_dim, rope, layer_idx,
                              *self.head_norms(config), backend=backend)

    def head_norms(self, config: ModelConfig):
        "Norms over each query and each key head; Llama has none"
        return None, None

    def forward(self, x, positions, ctx): return self.o_proj(self.attn(self.qkv_proj(x), positions, ctx))


class LlamaMLP(nn.Module):
    "Gate and up in one product, their gated activation, down"
    def __init__(self, config: ModelConfig, tp=SINGLE):
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, [config.intermediate_size] * 2,
                                                       bias=config.mlp_bias, tp=tp)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias, tp=tp)
        self.act_fn = SiluAndMul()

    def forward(self, x): return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class LlamaDecoderLayer(nn.Module):
    "Norm, attention, norm, MLP; both results are added to the residual stream by the *next* norm"
    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: torch.Tensor,  # `[num_tokens, hidden_size]`, what the previous layer adds to the stream
        residual: torch.Tensor | None,  # `[num_tokens, hidden_size]`, the stream so far; None before the first layer
        positions: torch.Tensor,  # `[num_tokens]`
        ctx: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # (what this layer adds, the stream)
        "One layer"
        # the first residual is the raw embedding, not its norm
        if residual is None: x, residual = self.input_layernorm(x), x
        else: x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, positions, ctx)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class LlamaModel(nn.Module):
    "Embedding, decoder layers, last norm"
    def __init__(self, config: ModelConfig, make_attention, make_mlp, tp=SINGLE):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, tp)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, make_attention(i), make_mlp(i)) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, token_ids, positions, ctx):
        x, residual = self.embed_tokens(token_ids), None
        for layer in self.layers: x, residual = layer(x, residual, positions, ctx)
        return self.norm(x, residual)[0]


@register_model("LlamaForCausalLM")
class LlamaForCausalLM(nn.Module):
    "The model and its head; other families replace the attention or the MLP"
    attention_class = LlamaAttention
    mlp_class = LlamaMLP
    packed_modules = {
        "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
        "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
    }

    def __init__(
        self,
        config: ModelConfig,
        max_position: int,  # positions the rotary table holds
        backend: type = TorchAttentionBackend,
        tp=SINGLE,
    ):
        super().__init__()
        self.config, self.tie_word_embeddings = config, config.tie_word_embeddings
        rope = RotaryEmbedding(config.head_dim, max_position, config.rope_theta, config.rope_scaling)
        self.model = LlamaModel(config, lambda i: self.attention_class(config, i, rope, backend, tp),
                                lambda i: self.mlp_class(config, tp), tp)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tp)
        if config.tie_word_embeddings: self.lm_head.tie(self.model.embed_tokens)

    def forward(
        self,
        token_ids: torch.Tensor,  # `[num_tokens]` int64, all sequences' tokens of this step one after another
        positions: torch.Tensor,  # `[num_tokens]` int64
        ctx: ForwardContext,
    ) -> torch.Tensor:  # `[num_tokens, hidden_size]`
        "Hidden states of this step's tokens"
        return self.model(token_ids, positions, ctx)

    def compute_logits(
        self,
        hidden_states: torch.Tensor,  # `[num_rows, hidden_size]`, the rows to sample from
    ) -> torch.Tensor | None:  # `[num_rows, vocab_size]`; None on ranks other than 0
        "Logits of the rows that will be sampled"
        return self.lm_head(hidden_states)

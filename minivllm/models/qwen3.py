"Qwen3: Llama with an RMSNorm over each query and each key head"
from minivllm.config import ModelConfig
from minivllm.layers.layernorm import RMSNorm
from minivllm.models.llama import LlamaAttention, LlamaForCausalLM
from minivllm.models.registry import register_model


class Qwen3Attention(LlamaAttention):
    "Queries and keys are normalised per head before they are rotated"
    def head_norms(self, config: ModelConfig):
        return RMSNorm(config.head_dim, config.rms_norm_eps), RMSNorm(config.head_dim, config.rms_norm_eps)


@register_model("Qwen3ForCausalLM")
class Qwen3ForCausalLM(LlamaForCausalLM):
    "Dense Qwen3"
    attention_class = Qwen3Attention
    # the norms belong to the attention layer, one level below where the checkpoint keeps them
    packed_modules = {
        **LlamaForCausalLM.packed_modules,
        "attn.q_norm": {"q_norm": None},
        "attn.k_norm": {"k_norm": None},
    }

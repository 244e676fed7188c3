"""Tensor parallelism with whole rows whose all-reduces leave no tail: each hides behind the other half of the batch.

Where every rank has all rows, what follows a row layer needs its sum at once: nothing of its own is left to compute
meanwhile. So a decoder layer takes the batch in two halves and starts the sum of one half before it turns to the
other. A layer hands on halves whose last sums are still under way. In the backward the sums of input gradients hide
behind the other half by themselves (`replicate_matmul`). Source: Domino (arXiv 2409.15241).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM

from stretto.overlap import Pending, RowLinear, matmul_all_reduce_start


@dataclass
class Half:
    """(batch / 2, rows, hidden), to which a sum is still to be added."""

    residual: Tensor
    sum: Pending | None = None

    def value(self) -> Tensor:
        """Complete."""
        return self.residual if self.sum is None else self.residual + self.sum.wait()


class StartedRowLinear(RowLinear):
    """A row layer whose sum over ranks is under way, as `sum`, when its forward returns."""

    sum: Pending

    def forward(self, input: Tensor) -> Tensor:
        """What is not to be read before `sum.wait()`."""
        how = self.options.of_call([self])
        self.sum = matmul_all_reduce_start(input, self.weight.to_local(), self.mesh.get_group(), **how)
        return self.sum.out


class HalvesLayer(LlamaDecoderLayer):
    """`LlamaDecoderLayer` on two halves of the batch: attention, attention, MLP, MLP."""

    def forward(self, halves: list[Half], **kwargs: Any) -> list[Half]:
        """Each sum is under way while the other half computes."""
        halves = [self._attend(half.value(), kwargs) for half in halves]
        return [self._transform(half.value()) for half in halves]

    def _attend(self, x: Tensor, kwargs: dict[str, Any]) -> Half:
        self.self_attn(hidden_states=self.input_layernorm(x), **kwargs)
        return Half(x, self.self_attn.o_proj.sum)

    def _transform(self, x: Tensor) -> Half:
        self.mlp(self.post_attention_layernorm(x))
        return Half(x, self.mlp.down_proj.sum)


class HalvesLlama(LlamaForCausalLM):
    """`LlamaForCausalLM` of tokens (batch, rows), the batch in two halves from the embedding to the logits."""

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        """The first half's logits hide the second's last sum, in the backward the other way round."""
        model = self.model
        x = model.embed_tokens(input_ids)
        positions = model.rotary_emb(x, torch.arange(x.shape[1], device=x.device).unsqueeze(0))
        halves = [Half(part) for part in x.chunk(2)]
        for layer in model.layers:
            halves = layer(halves, position_embeddings=positions, attention_mask=None)
        logits = [self.lm_head(model.norm(half.value())) for half in halves]
        return CausalLMOutput(logits=torch.cat(logits))


def use_halves(model: LlamaForCausalLM) -> None:
    """Make a tensor-parallel model a `HalvesLlama`, in place. `ValueError` for an attention that needs a mask."""
    if model.config._attn_implementation != "sdpa":
        raise ValueError(f"attention is {model.config._attn_implementation!r}; without a mask only 'sdpa' is causal")
    model.__class__ = HalvesLlama
    for layer in model.model.layers:
        layer.__class__ = HalvesLayer
        for row in (layer.self_attn.o_proj, layer.mlp.down_proj):
            row.__class__ = StartedRowLinear

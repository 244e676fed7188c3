"""Parallel layers whose communication leaves no tail: it hides behind the products on either side of it."""

from stretto.overlap.all_reduce import matmul_all_reduce, matmul_all_reduce_start, replicate_matmul
from stretto.overlap.attention import (
    attention_all_to_all,
    attention_reduce_scatter,
    matmul_all_to_all,
    repeat_kv_heads,
    scaled_dot_product_attention,
    split_heads,
)
from stretto.overlap.attention_halves import attention_all_to_all_start, matmul_all_to_all_start
from stretto.overlap.cross_entropy import causal_lm_loss, vocab_cross_entropy
from stretto.overlap.ddp import ReductionThread, reduce_bucket
from stretto.overlap.faults import PeerError
from stretto.overlap.fsdp import FsdpReducer
from stretto.overlap.gradients import GradientReducer
from stretto.overlap.lora import parallelize_lora
from stretto.overlap.matmul import all_gather_matmul, matmul_reduce_scatter
from stretto.overlap.modules import ColumnLinear, LinearOptions, RowLinear
from stretto.overlap.p2p import report
from stretto.overlap.pending import Pending
from stretto.overlap.plans import parallelize
from stretto.overlap.records import OverlapWarning, Report
from stretto.overlap.shipped import LLAMA, LLAMA_TP, QWEN2, QWEN2_TP, QWEN3, QWEN3_TP
from stretto.overlap.shipped_diffusion import FLUX, FLUX_TP, WAN, WAN_I2V, WAN_I2V_TP, WAN_TP
from stretto.overlap.torch_styles import OverlapColwise, OverlapRowwise
from stretto.overlap.tracing import Trace, trace
from stretto.overlap.weights import weight_gather_matmul

__all__ = [
    "FLUX",
    "FLUX_TP",
    "LLAMA",
    "LLAMA_TP",
    "QWEN2",
    "QWEN2_TP",
    "QWEN3",
    "QWEN3_TP",
    "WAN",
    "WAN_I2V",
    "WAN_I2V_TP",
    "WAN_TP",
    "ColumnLinear",
    "FsdpReducer",
    "GradientReducer",
    "LinearOptions",
    "OverlapColwise",
    "OverlapRowwise",
    "OverlapWarning",
    "PeerError",
    "Pending",
    "ReductionThread",
    "Report",
    "RowLinear",
    "Trace",
    "all_gather_matmul",
    "attention_all_to_all",
    "attention_all_to_all_start",
    "attention_reduce_scatter",
    "causal_lm_loss",
    "matmul_all_reduce",
    "matmul_all_reduce_start",
    "matmul_all_to_all",
    "matmul_all_to_all_start",
    "matmul_reduce_scatter",
    "parallelize",
    "parallelize_lora",
    "reduce_bucket",
    "repeat_kv_heads",
    "replicate_matmul",
    "report",
    "scaled_dot_product_attention",
    "split_heads",
    "trace",
    "vocab_cross_entropy",
    "weight_gather_matmul",
]

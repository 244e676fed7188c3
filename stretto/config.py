"""Every setting of a run, typed, with one sentence a field.

Seen by `cli` and `train` alone: the lower rooms take plain arguments. The defaults are a complete recipe but for
the model, the prompts and the rewards. `stretto.recipe` reads and writes these as TOML; `validate` names every
fault at once, with the value and the way out. Imports no torch.
"""

from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "Advantage",
    "Checkpoint",
    "Config",
    "Ema",
    "Evaluation",
    "Model",
    "Objective",
    "Optimizer",
    "Parallel",
    "Prompts",
    "Reward",
    "Run",
    "Sampling",
    "Schedule",
    "Scoring",
    "TrainedSteps",
    "Tuning",
]


@dataclass(frozen=True)
class Run:
    """Where a run lives and how long it is."""

    folder: str = "runs/default"
    """The run folder: config, metrics, grids and checkpoints go here and nowhere else."""
    seed: int = 0
    """The root of every random draw; draws are keyed by (seed, iteration, prompt, sample, step)."""
    iterations: int = 100
    """Rollouts (each followed by its optimizer steps)."""
    resume: Literal["no", "auto"] = "no"
    """`auto` goes on from the newest whole checkpoint of the folder, or starts if there is none."""
    device: str = "auto"
    """`auto` (CUDA where there is one, else the CPU), `cpu`, `cuda` or `cuda:1`."""
    threads: int = 0
    """CPU threads of torch; 0 leaves torch's own choice. Bitwise resume needs the same number."""
    tensorboard: bool = False
    """Also write TensorBoard event files (needs the extra `tensorboard`)."""


@dataclass(frozen=True)
class Model:
    """The flow model that is post-trained."""

    adapter: Literal["digits", "flux", "wan"] = "digits"
    """Which model adapter: `digits` is the shipped toy, `flux` and `wan` load diffusers folders."""
    path: str = ""
    """A diffusers folder or hub id; empty for `digits`, whose base ships with the package."""
    height: int = 512
    """Pixels; ignored by `digits` (8)."""
    width: int = 512
    """Pixels; ignored by `digits` (8)."""
    frames: int = 1
    """Frames of a video (4k + 1 for Wan); images have 1."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage of the frozen weights; trained weights are always float32."""
    autocast: Literal["none", "bfloat16"] = "none"
    """Compute dtype of the transformer's products."""
    checkpointing: bool = False
    """Activation checkpointing inside the transformer: less memory, one more forward inside each backward."""
    guidance_embedded: float = 3.5
    """Guidance scale fed to guidance-distilled models (FLUX.1-dev); ignored by others."""
    guidance: float = 1.0
    """Classifier-free guidance scale; 1 turns the second branch off. Both branches carry gradient."""
    text_length: int = 512
    """Tokens that a prompt is padded or cut to (FLUX.1-schnell takes 256 at most)."""
    negative_prompt: str = ""
    """The prompt of the unconditional branch when `guidance` is not 1."""


@dataclass(frozen=True)
class Tuning:
    """Which weights move."""

    method: Literal["lora", "full"] = "lora"
    """LoRA adapters on a frozen base, or every weight."""
    rank: int = 32
    """LoRA rank."""
    alpha: int = 64
    """LoRA alpha; the update is scaled by alpha / rank."""
    targets: list[str] = field(default_factory=list)
    """Suffixes of the linear layers that get LoRA; empty takes the adapter's own list (attention and MLP)."""
    start_from: str = ""
    """A folder with a saved LoRA to start from; empty starts at zero."""


@dataclass(frozen=True)
class Prompts:
    """What is asked for, and in what groups."""

    file: str = ""
    """A text file with one prompt a line, or .jsonl with {"prompt": ..., ...}; empty takes the adapter's own."""
    per_iteration: int = 8
    """Prompt groups in one rollout."""
    samples: int = 12
    """M, the samples of one prompt group; at least 2."""
    shuffle: bool = True
    """Draw each pass over the prompts in a fresh order, keyed by the seed; else in file order."""


@dataclass(frozen=True)
class Sampling:
    """The trajectory: how noise becomes a picture during training."""

    steps: int = 10
    """T, the number of transitions from noise to data."""
    sigmas: Literal["linear", "shifted", "dynamic", "pipeline"] = "shifted"
    """linspace(1, 0), the same shifted, the model's resolution-dependent shift, or the pipeline's own spacing."""
    shift: float = 3.0
    """s of s*t / (1 + (s-1)*t), for `shifted`."""
    dynamics: Literal["flow_sde", "dance_sde", "cps", "wan_flow_sde"] = "flow_sde"
    """The stochastic step: Flow-GRPO's, DanceGRPO's, coefficients-preserving, or Flow-GRPO's for Wan."""
    noise_level: float = 0.7
    """a (flow_sde, cps) or eta (dance_sde); unused by wan_flow_sde."""
    noise_untrained: bool = False
    """Keep the noise on steps that are not trained (Flow-GRPO and DanceGRPO outside window recipes)."""
    initial_noise: Literal["sample", "group"] = "sample"
    """Initial noise drawn per sample, or once per prompt group (DanceGRPO); step noise is always per sample."""
    samples_per_forward: int = 1
    """Rows of one forward in the rollout."""


@dataclass(frozen=True)
class TrainedSteps:
    """Which transitions carry gradient; drawn before the rollout. The last one never does, unless listed."""

    rule: Literal["all_but_last", "fraction", "random_window", "progressive_window", "list"] = "all_but_last"
    """All but the last; a drawn fraction; a window drawn per prompt group; a window that moves; an explicit list."""
    fraction: float = 0.6
    """Share of the steps before the last, for `fraction`."""
    size: int = 2
    """Length of a window."""
    start_max: int | None = None
    """Latest start of a random window; none means as late as it fits."""
    move_every: int = 25
    """Iterations between moves of a progressive window by `stride` steps; it returns to 0 at the end."""
    stride: int = 1
    """Steps by which a progressive window moves."""
    steps: list[int] = field(default_factory=list)
    """The explicit list."""
    drawn_per: Literal["group", "iteration"] = "group"
    """Draw once for each prompt group, or once for all groups of an iteration (they can then share forwards)."""


@dataclass(frozen=True)
class Reward:
    """One reward: media and prompts in, one number a sample out."""

    name: str = ""
    """A shipped reward (`digits`, `brightness`), `package.module:function`, or `path/to/file.py:function`."""
    weight: float = 1.0
    """Its weight in the sum."""


@dataclass(frozen=True)
class Scoring:
    """How rewards are called, and what happens when a remote one fails (a local one that raises stops the run)."""

    behind: bool = True
    """Score one prompt group while the next is rolled out, in a thread; the numbers are the same either way."""
    attempts: int = 5
    """How often a remote reward is asked before it counts as failed."""
    backoff_s: float = 1.0
    """Seconds before the second attempt; doubled before each further one, a minute at most."""
    timeout_s: float = 60.0
    """Seconds that one attempt may take."""
    on_failure: Literal["stop", "skip"] = "stop"
    """Stop the run with a checkpoint, or leave that prompt group out of the iteration and count it."""


@dataclass(frozen=True)
class Advantage:
    """From rewards to advantages: (r - mean) / (std + 1e-4), clamped."""

    std: Literal["group", "global"] = "group"
    """Standard deviation of each prompt group, or over all groups of an optimizer step (the mean is the group's)."""
    unbiased: bool = False
    """Divide by M - 1 in the standard deviation instead of M."""
    clamp: float = 5.0
    """Advantages are clamped to plus or minus this."""
    rewards: Literal["weighted_sum", "normalized"] = "weighted_sum"
    """Several rewards: sum weighted rewards and normalise once, or normalise each on its own and then sum."""
    best: int = 0
    """Best-of-n: keep this many highest rewards of each group (0 keeps all samples)."""
    worst: int = 0
    """Best-of-n: keep this many lowest rewards of each group."""


@dataclass(frozen=True)
class Objective:
    """The loss of one trained step."""

    clip_range: float = 1e-4
    """e of the clipped ratio; active only after the first optimizer step of a rollout."""
    kl_beta: float = 0.0
    """Weight of the KL to the reference policy (LoRA: the adapter off; full: a frozen copy)."""
    kl_convention: Literal["flow_grpo", "wan"] = "flow_grpo"
    """mean((mean - mean_ref)^2) / (2 std^2), or the same divided also by -dt (`wan`)."""
    guard: bool = False
    """GRPO-Guard's step weights."""
    reduction: Literal["mean", "sum"] = "mean"
    """Over samples and trained steps of an optimizer step; decides what clip_norm means."""


@dataclass(frozen=True)
class Schedule:
    """When the gradient is made."""

    name: Literal["auto", "native", "retain", "reweight", "two_sum", "hybrid"] = "auto"
    """`auto`: with KL or best-of-n retain, else reweight; timed against native with replay at the start of
    a run of one process."""
    retain_last: int = 1
    """Trained steps whose graphs hybrid keeps; it reweights those before."""
    replay_batch: int = 1
    """Rows of one update forward in native: several steps and samples of a trajectory at once (0: all)."""
    race: int = 2
    """Iterations of timing native with replay against the default before `auto` settles (0: no race)."""


@dataclass(frozen=True)
class Optimizer:
    """AdamW and how often it steps."""

    lr: float = 3e-4
    """Learning rate after warm-up."""
    warmup: int = 0
    """Optimizer steps of linear warm-up."""
    beta1: float = 0.9
    """First moment decay."""
    beta2: float = 0.999
    """Second moment decay."""
    weight_decay: float = 1e-4
    """Decoupled weight decay."""
    clip_norm: float = 1.0
    """Clip the gradient's norm to this before a step; 0 does not clip."""
    spike_norm: float = 0.0
    """Skip (and count) a step whose gradient norm before clipping exceeds this; 0 never skips."""
    updates_per_rollout: int = 1
    """Optimizer steps a rollout; only the first is recompute-free, the others are native with the ratio clip."""
    updates_over: Literal["parts", "all"] = "parts"
    """Several updates: over disjoint parts of the prompt groups, or each over the whole rollout again."""


@dataclass(frozen=True)
class Ema:
    """Moving average of the trained weights, used for evaluation and saved beside them."""

    decay: float = 0.9
    """Upper bound of min((1+n)/(10+n), decay); 0 turns EMA off."""


@dataclass(frozen=True)
class Evaluation:
    """Fixed prompts and noise, ODE sampler, EMA weights."""

    every: int = 20
    """Iterations between evaluations and sample grids; 0 never."""
    prompts: list[str] = field(default_factory=list)
    """Held-out prompts; empty takes the first of the training prompts."""
    samples: int = 4
    """Samples a prompt."""
    steps: int = 0
    """Steps of the ODE; 0 takes sampling.steps."""
    patience: int = 0
    """Stop after this many evaluations in a row without a better reward; 0 never stops early."""
    judge: str = ""
    """A shipped judge (`digits`) or a function as for rewards that returns a dict of numbers; empty for none."""


@dataclass(frozen=True)
class Checkpoint:
    """What is kept so that a run goes on exactly."""

    every: int = 20
    """Iterations between checkpoints; 0 only at the end and on a signal."""
    keep: int = 2
    """Newest checkpoints kept (the best by evaluation reward is kept beside them)."""
    asynchronous: bool = True
    """Write a checkpoint while the next iteration runs."""


@dataclass(frozen=True)
class Parallel:
    """The ranks that torchrun starts, as a mesh: replicate x shard x ulysses x tensor is their number."""

    replicate: int = 0
    """Copies of the model that make different samples; 0 takes the ranks that the other axes leave."""
    shard: int = 1
    """FSDP2: ranks that make different samples and hold one model between them."""
    ulysses: int = 1
    """Ranks that share a sample and split its tokens; attention splits its heads."""
    tensor: int = 1
    """Ranks that share a sample and split its attention and feed-forward layers."""
    shard_rows: bool = True
    """With `tensor`: also split the tokens between the products (sequence sharding)."""
    reduction: Literal["auto", "late", "coalesced", "per_step"] = "auto"
    """When gradients are summed: sent before their advantage is known and scaled by their owner, once an optimizer
    step, or at every trained step. `auto`: late with two_sum, and with reweight at one sample a forward; else
    coalesced."""
    optimizer_state: Literal["sharded", "whole"] = "sharded"
    """A replica keeps its share (ZeRO-1), and the new weights are gathered behind the next forward; or all of it."""
    timeout_s: float = 600.0
    """Seconds after which a rank that waits for another gives up, and the run ends on every rank."""


@dataclass(frozen=True)
class Config:
    """A whole run. TOML has one table a section; `--section.field value` overrides."""

    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    tuning: Tuning = field(default_factory=Tuning)
    prompts: Prompts = field(default_factory=Prompts)
    sampling: Sampling = field(default_factory=Sampling)
    trained_steps: TrainedSteps = field(default_factory=TrainedSteps)
    rewards: list[Reward] = field(default_factory=list)
    scoring: Scoring = field(default_factory=Scoring)
    advantage: Advantage = field(default_factory=Advantage)
    objective: Objective = field(default_factory=Objective)
    schedule: Schedule = field(default_factory=Schedule)
    optimizer: Optimizer = field(default_factory=Optimizer)
    ema: Ema = field(default_factory=Ema)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    parallel: Parallel = field(default_factory=Parallel)

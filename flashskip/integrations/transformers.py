"""Attention for Hugging Face transformers: ``attn_implementation="flashskip"``."""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from flashskip._options import refusal
from flashskip.errors import UnsupportedVariant
from flashskip.integrations._masks import AttentionMask, attention_mask
from flashskip.integrations._phases import Decode, Phase, Prefill, new_workspace
from flashskip.policy import SkipSoftmaxConfig

NAME = "flashskip"
PHASES: dict[str, type[Phase]] = {"prefill": Prefill, "decode": Decode}

# Arguments of other attention functions that change the result and have no counterpart here.
_REFUSED = ("head_mask", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k", "block_table")


def register(
    config: SkipSoftmaxConfig | None = None,
    *,
    model: nn.Module | None = None,
    collect_stats: bool = False,
) -> FlashSkipAttention:
    """Make ``attn_implementation="flashskip"`` known to transformers.

    Registering again replaces the configuration, also for models that are loaded already. Models
    run without gradients; on a GPU they are loaded in bfloat16 or float16. A forward pass with one
    query per request is decode, any other prefill.

    Parameters
    ----------
    config : SkipSoftmaxConfig, optional
        How much each phase and layer may skip. None: dense.
    model : nn.Module, optional
        Where the layers that ``config.ignore`` names are found.
    collect_stats : bool
        Count skipped and visited tiles: `FlashSkipAttention.stats`.

    Returns
    -------
    FlashSkipAttention
        The registered attention function.

    Raises
    ------
    ImportError
        If transformers is not installed.
    TypeError
        If `config` is no SkipSoftmaxConfig.
    ValueError
        If `collect_stats` is set and nothing skips, or layers are ignored without a model.

    Examples
    --------
    >>> import flashskip
    >>> from flashskip.integrations.transformers import register
    >>> config = flashskip.SkipSoftmaxConfig(threshold={"prefill": 0.01, "decode": 0.001})
    >>> attention = register(config, collect_stats=True)
    >>> # AutoModelForCausalLM.from_pretrained(path, attn_implementation="flashskip", dtype="auto")
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    config = SkipSoftmaxConfig() if config is None else config
    attention = FlashSkipAttention(config, model, collect_stats)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)
    _keep_from_flash_attention_preload()
    return attention


class FlashSkipAttention:
    """The attention function that `register` hands to transformers.

    It keeps two wrappers per attention layer, planned again when a shape changes. Those of
    all layers that first ran on one stream share scratch memory: run a model on one stream at a
    time.

    Parameters
    ----------
    config, model, collect_stats
        As in `register`.
    """

    def __init__(
        self, config: SkipSoftmaxConfig, model: nn.Module | None, collect_stats: bool
    ) -> None:
        if not isinstance(config, SkipSoftmaxConfig):
            raise TypeError(
                f"config is {type(config).__name__}; expected a flashskip.SkipSoftmaxConfig or "
                "None. Pass SkipSoftmaxConfig(threshold=...)."
            )
        sources = (config.threshold, config.threshold_scale_factor, config.target_sparsity)
        if collect_stats and all(source is None for source in sources):
            raise refusal(
                "collect_stats is set and config skips nothing",
                "a threshold, factor or target",
                "Pass config=SkipSoftmaxConfig(threshold=0.0) to count without skipping",
            )
        if bool(config.ignore) and model is None:
            raise refusal(
                f"config.ignore names {config.ignore[:1]} and model is None",
                "the model whose layers these are",
                "Pass model=model, after loading it",
            )
        self.config = config
        self._collect_stats = collect_stats
        self._layers: weakref.WeakKeyDictionary[nn.Module, dict[str, Phase]] = (
            weakref.WeakKeyDictionary()
        )
        self._workspaces: dict[tuple[torch.device, int], Tensor] = {}
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        if model is not None:
            self._names.update((module, name) for name, module in model.named_modules())

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # plans on the host
    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: AttentionMask | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attend as transformers asks.

        Parameters
        ----------
        module : nn.Module
            The attention layer; its wrappers are kept as long as it lives.
        query : Tensor
            ``[batch_size, num_qo_heads, qo_len, head_dim]``.
        key, value : Tensor
            ``[batch_size, num_kv_heads, kv_len, head_dim]``.
        attention_mask : AttentionMask, optional
            What `flashskip.integrations._masks.attention_mask` returned for this forward pass.
        scaling, softcap, s_aux, sliding_window, is_causal
            As in transformers: score scale, soft cap, sink logits, window, causal without a mask.
        dropout, output_attentions
            Refused when set.
        **kwargs
            What has no effect on the result (positions, cache flags).

        Returns
        -------
        tuple of Tensor and None
            ``[batch_size, qo_len, num_qo_heads, head_dim]``, and no attention weights.

        Raises
        ------
        UnsupportedVariant
            If the layer asks for what there is no kernel for; the message names it.
        """
        refuse_unsupported(dropout=dropout, output_attentions=output_attentions, **kwargs)
        mask = resolve_mask(attention_mask, module, query, key, sliding_window, is_causal)
        name = "decode" if mask.qo_len == 1 else "prefill"
        phase = self._phase(module, name, query.device)
        skipping = self.config.options(
            name,
            layer=self._names.get(module),
            batch_size=query.shape[0],
            device=query.device,
        )
        counting = self._collect_stats and bool(skipping)
        options = {
            **layer_options(query, key, scaling, softcap, s_aux),
            **skipping,
            "collect_stats": counting,
        }
        out = phase.attend(query, key, value, mask, options)
        self.config.check(name, phase.wrapper.geometry, kv_len=key.shape[2])
        if counting:
            phase.count()
        return out, None

    def stats(self, phase: str) -> list[tuple[int, int]]:
        """Return (skipped, visited) tiles of each layer since `reset_stats`, in order of first use.

        Parameters
        ----------
        phase : {"prefill", "decode"}
            Which forward passes.
        """
        if phase not in PHASES:
            raise ValueError(f"phase is {phase!r}; expected one of {', '.join(map(repr, PHASES))}.")
        counts = [layer[phase].counts for layer in self._layers.values() if phase in layer]
        return [(int(skipped), int(visited)) for skipped, visited in counts]

    def reset_stats(self) -> None:
        """Forget the counts of all layers."""
        for layer in self._layers.values():
            for phase in layer.values():
                phase.counts.zero_()

    def _phase(self, module: nn.Module, name: str, device: torch.device) -> Phase:
        """Return what is kept for a layer and phase."""
        layer = self._layers.setdefault(module, {})
        phase = layer.get(name)
        if phase is None or phase.counts.device != device:
            phase = layer[name] = PHASES[name](device, self._workspace(device))
        return phase

    def _workspace(self, device: torch.device) -> Tensor:
        """Return the scratch memory of the layers that first ran on the current stream."""
        stream = 0 if device.type == "cpu" else torch.cuda.current_stream(device).cuda_stream
        if (device, stream) not in self._workspaces:
            self._workspaces[device, stream] = new_workspace(device)
        return self._workspaces[device, stream]


def _keep_from_flash_attention_preload() -> None:
    """Stop transformers from importing a FlashAttention package for our name.

    It takes every implementation with "flash" in its name for a build of FlashAttention and
    preloads that build when a model is made. There is none to preload for this one.
    """
    from transformers import modeling_utils

    preload = modeling_utils.lazy_import_flash_attention
    if getattr(preload, "knows_flashskip", False):
        return

    @functools.wraps(preload)
    def preload_others(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        return None if implementation == NAME else preload(implementation, *args, **kwargs)

    preload_others.knows_flashskip = True  # type: ignore[attr-defined]
    modeling_utils.lazy_import_flash_attention = preload_others


def layer_options(
    query: Tensor, key: Tensor, scaling: float | None, softcap: float | None, s_aux: Tensor | None
) -> dict[str, Any]:
    """Return what a layer's arguments mean for `plan()`, apart from its mask and from skipping."""
    return {
        "q_data_type": query.dtype,
        "kv_data_type": key.dtype,
        "sm_scale": scaling,
        "logits_soft_cap": softcap,
        "sinks": None if s_aux is None else s_aux.float(),
    }


def resolve_mask(
    mask: object,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    sliding_window: int | None,
    is_causal: bool | None,
) -> AttentionMask:
    """Return the mask; where the model made none, the layer says whether it is causal."""
    if isinstance(mask, AttentionMask):
        return mask
    if mask is not None:
        found = f"a tensor {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise UnsupportedVariant(
            f"attention_mask is {found}; flashskip supports None and 2-D padding masks given to "
            "the model. Load the model with attn_implementation='sdpa' for masks of your own."
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window_left = -1 if sliding_window is None else sliding_window - 1
    if window_left >= 0 and not causal:
        raise UnsupportedVariant(
            f"sliding_window is {sliding_window} without causal attention; flashskip supports "
            "causal windows. Load the model with attn_implementation='sdpa'."
        )
    return AttentionMask(query.shape[0], query.shape[2], key.shape[2], causal, window_left)


def refuse_unsupported(dropout: float, output_attentions: bool | None, **kwargs: object) -> None:
    """Raise for arguments that would change the result and have no kernel."""
    given = [name for name in _REFUSED if kwargs.get(name) is not None]
    if output_attentions:
        given.insert(0, "output_attentions")
    if dropout > 0:
        given.insert(0, f"dropout={dropout}")
    if given:
        raise UnsupportedVariant(
            f"the model passes {given[0]}; flashskip computes inference attention without it. "
            "Drop it, or load the model with attn_implementation='eager'."
        )


def cache_argument(model: nn.Module) -> str:
    """Return what `forward` calls its KV cache; the name changed between releases."""
    parameters = inspect.signature(model.forward).parameters
    return next(name for name in ("cache", "past_key_values") if name in parameters)
